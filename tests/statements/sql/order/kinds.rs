//! Inputs of every kind of operator.

use libtest_mimic::Failed;

use super::{Stored, compare};

/// A prefix of the query, such as a CTE, and the input.
const KINDS: &[(&str, &str)] = &[
    ("", "SELECT * FROM t"),
    ("", "SELECT * FROM t WHERE g <> 1"),
    ("", "SELECT id + 1 AS id, v FROM t WHERE f > 0"),
    ("", "SELECT DISTINCT g, v, id % 100 AS id FROM t"),
    ("", "SELECT DISTINCT ON (g) g, id, v FROM t ORDER BY g, f"),
    ("", "SELECT g AS id, [sum(f), avg(f)] AS v FROM t GROUP BY g"),
    ("", "SELECT id % 3000 AS id, [sum(f)] AS v FROM t GROUP BY id % 3000"),
    ("", "SELECT min(id) AS id, first_value(v) AS v, g FROM t GROUP BY g, id % 999"),
    ("", "SELECT count(DISTINCT g) AS id, [count(*) * 1.0, sum(f)] AS v FROM t GROUP BY id % 500"),
    ("", "SELECT max(id) AS id, last_value(v) AS v FROM t GROUP BY GROUPING SETS ((g), (id % 7))"),
    ("", "SELECT min(id) AS id, v FROM t GROUP BY v HAVING count(*) > 3"),
    ("", "SELECT g AS id, [count(*) * 1.0, count(f) * 0.5, sum(id) * 0.1] AS v FROM t GROUP BY g"),
    (
        "",
        "SELECT max(id) AS id, [sum(g) FILTER (WHERE f > 0) * 1.0, 2.0] AS v FROM t GROUP BY id % 999",
    ),
    ("", "SELECT row_number() OVER () AS id, v FROM (SELECT DISTINCT v FROM t)"),
    (
        "",
        "SELECT row_number() OVER () AS id, v FROM (SELECT DISTINCT CASE WHEN id > 9000 THEN [id * 1.0] WHEN id % 3 = 0 THEN [0.0] WHEN id % 3 = 1 THEN [-0.0] ELSE [1.0 / 3] END AS v FROM t)",
    ),
    ("", "SELECT row_number() OVER () AS id, [min(f), max(f)] AS v FROM t GROUP BY f * g"),
    ("", "SELECT id, v FROM t WHERE id > (SELECT min(id) + count(*) / 2 + sum(g) / 99 FROM t)"),
    (
        "",
        "SELECT count(*) AS id, a.v FROM t AS a JOIN s AS b ON a.g = b.g AND b.id < 9 GROUP BY a.v",
    ),
    ("", "SELECT t.id, s.v FROM t JOIN s ON t.id % 300 = s.id WHERE t.f > s.f AND s.id < 50"),
    (
        "",
        "SELECT id, v FROM (SELECT t.id, t.v FROM t JOIN s ON t.id = s.id UNION ALL SELECT id, v FROM s) LIMIT 400",
    ),
    ("", "SELECT t.id, t.v FROM t JOIN s ON t.id % 300 = s.id"),
    ("", "SELECT t.id, s.v FROM s JOIN t ON t.id % 150 = s.id / 2"),
    ("", "SELECT t.id, t.v FROM t LEFT JOIN s ON t.id = s.id * 2 AND s.g < 3"),
    ("", "SELECT t.id, t.v FROM s LEFT JOIN t ON t.id % 600 = s.id"),
    ("", "SELECT t.id, t.v FROM s RIGHT JOIN t ON t.id % 600 = s.id"),
    (
        "",
        "SELECT coalesce(t.id, -s.id) AS id, coalesce(t.v, s.v) AS v FROM t FULL JOIN s ON t.id = s.id * 50 + 1",
    ),
    (
        "",
        "SELECT coalesce(t.id, -s.id) AS id, coalesce(t.v, s.v) AS v FROM s FULL JOIN t ON t.id = s.id * 50 + 1",
    ),
    ("", "SELECT t.id, t.v FROM t LEFT SEMI JOIN s ON t.g = s.g AND t.id % 7 = s.id"),
    ("", "SELECT t.id, t.v FROM t LEFT ANTI JOIN s ON t.id = s.id"),
    ("", "SELECT t.id, t.v FROM t WHERE id % 400 IN (SELECT id FROM s WHERE g < 3)"),
    ("", "SELECT t.id, t.v FROM t WHERE id % 400 NOT IN (SELECT id FROM s)"),
    ("", "SELECT t.id, t.v FROM t WHERE EXISTS (SELECT 1 FROM s WHERE s.id = t.id % 1000)"),
    ("", "SELECT t.id, t.v FROM t, (SELECT * FROM s WHERE id < 3) AS few"),
    ("", "SELECT t.id, t.v FROM (SELECT * FROM s WHERE id < 3) AS few CROSS JOIN t"),
    ("", "SELECT t.id, t.v FROM t JOIN s ON t.id < s.id AND s.id < 20"),
    (
        "",
        "SELECT t.id, t.v FROM (SELECT * FROM s WHERE id > 290) AS few LEFT JOIN t ON t.id < few.id AND t.g = 1 AND few.f < t.f",
    ),
    (
        "",
        "SELECT a.id, b.v FROM t AS a JOIN t AS b ON a.id = b.id JOIN s ON s.g = a.g AND s.id < 4",
    ),
    (
        "",
        "SELECT id, v FROM t WHERE g = 1 UNION ALL SELECT id, v FROM s UNION ALL SELECT -id, v FROM t WHERE g = 2",
    ),
    ("", "SELECT g AS id, v FROM t UNION SELECT g, v FROM s"),
    ("", "SELECT g AS id, v FROM t INTERSECT SELECT g, v FROM s"),
    ("", "SELECT id % 500 AS id, v FROM t EXCEPT SELECT id, v FROM s"),
    (
        "",
        "SELECT id, [sum(f)] AS v FROM (SELECT id % 9 AS id, f FROM t UNION ALL SELECT id % 11, f FROM s) GROUP BY id",
    ),
    ("", "SELECT row_number() OVER () AS id, v FROM t"),
    ("", "SELECT row_number() OVER (ORDER BY g) AS id, v FROM t"),
    ("", "SELECT rank() OVER (PARTITION BY g ORDER BY f) AS id, v FROM t"),
    (
        "",
        "SELECT id, [sum(f) OVER (PARTITION BY g ORDER BY id % 100 ROWS 3 PRECEDING)] AS v FROM t",
    ),
    ("", "SELECT id, [avg(f) OVER (PARTITION BY g), lag(f, 1, 0.0) OVER (ORDER BY g)] AS v FROM t"),
    ("", "SELECT * FROM t LIMIT 100"),
    ("", "SELECT * FROM t LIMIT 4000 OFFSET 5000"),
    ("", "SELECT * FROM t WHERE g = 2 LIMIT 50"),
    ("", "SELECT * FROM (SELECT * FROM t LIMIT 9000) WHERE g > 1"),
    ("", "SELECT * FROM t ORDER BY g LIMIT 500"),
    ("", "SELECT * FROM t ORDER BY g, f DESC LIMIT 70 OFFSET 3"),
    ("", "SELECT * FROM t ORDER BY g"),
    ("", "SELECT * FROM t ORDER BY f, g DESC"),
    ("", "SELECT * FROM (SELECT * FROM t ORDER BY g LIMIT 900) ORDER BY f LIMIT 100"),
    ("", "SELECT * FROM near"),
    ("", "SELECT near.id, near.v FROM near JOIN s ON near.id % 300 = s.id"),
    ("", "SELECT * FROM t WHERE f > (SELECT avg(f) FROM t)"),
    ("", "SELECT id, v FROM t WHERE f > (SELECT sum(f) FROM s WHERE s.g = t.g)"),
    ("WITH c AS (SELECT * FROM t WHERE g < 3 ORDER BY g)", "SELECT * FROM c"),
    (
        "WITH c AS (SELECT g, sum(f) AS f FROM t GROUP BY g)",
        "SELECT t.id, [c.f] AS v FROM t JOIN c USING (g)",
    ),
    (
        "WITH RECURSIVE r AS (SELECT id, v, 0 AS n FROM s UNION ALL SELECT id, v, n + 1 FROM kmeans(r, k => 2, vector => 'v') WHERE cluster_id = 0 AND n < 3)",
        "SELECT id + 1000 * n AS id, v FROM r",
    ),
    (
        "",
        "SELECT id, s['v'] AS v FROM (SELECT id, named_struct('v', v, 'g', g) AS s FROM t LIMIT 5000)",
    ),
    (
        "WITH RECURSIVE r AS (SELECT 1 AS id, [1.0, 2.0] AS v UNION ALL SELECT id + 1, [id * 0.7, 3.0] FROM r WHERE id < 60)",
        "SELECT r.id, r.v FROM r JOIN s ON r.id % 7 = s.g",
    ),
    ("", "SELECT unnest([id, -id]) AS id, v FROM t WHERE g = 0"),
    (
        "",
        "SELECT id, v, cluster_id AS c FROM kmeans((SELECT DISTINCT id, v FROM t), k => 3, seed => 2)",
    ),
    (
        "",
        "SELECT base_id AS id, base_v AS v FROM (SELECT base_id, [base_id * 1.0, distance] AS base_v FROM knn_exact(queries => (SELECT id, v FROM s LIMIT 200), base => t, k => 7, vector => 'v'))",
    ),
    (
        "",
        "SELECT id, v, kmeans(v, 3, 5) OVER (PARTITION BY g) AS label, count(*) OVER (PARTITION BY g) AS n FROM t",
    ),
    (
        "",
        "SELECT * FROM (VALUES (1, [0.0, 1.0]), (2, [0.0, 1.0]), (3, [2.0, 1.0]), (4, [5.0, 1.0]), (5, [5.0, 2.0])) AS few (id, v)",
    ),
];

pub async fn all() -> Result<(), Failed> {
    let stored = Stored::all().await?;
    for (with, input) in KINDS {
        compare(&stored, with, input).await?;
    }
    Ok(())
}
