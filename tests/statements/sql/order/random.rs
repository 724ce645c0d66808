//! Random inputs, built from operators of every kind.

use libtest_mimic::Failed;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use tokio::runtime::Handle;
use tokio::task::block_in_place;

use super::{Stored, compare};

/// Queries with the columns `id`, `g`, `f`, `v`.
fn inputs() -> impl Strategy<Value = String> {
    let leaf =
        prop_oneof![Just("SELECT * FROM t".to_string()), Just("SELECT * FROM s".to_string())];
    leaf.prop_recursive(4, 12, 2, |inner| {
        let one = (inner.clone(), 0..ONE.len(), 1..6usize);
        let two = (inner.clone(), inner, 0..TWO.len());
        prop_oneof![
            3 => one.prop_map(|(a, i, n)| {
                ONE[i].replace("{a}", &a).replace("{n}", &n.to_string())
            }),
            1 => two.prop_map(|(a, b, i)| TWO[i].replace("{a}", &a).replace("{b}", &b)),
        ]
    })
}

const ONE: &[&str] = &[
    "SELECT * FROM ({a}) WHERE g <> {n}",
    "SELECT id + {n} AS id, g, f, v FROM ({a}) WHERE f > 0 OR g = {n}",
    "SELECT DISTINCT id, g, f, v FROM ({a})",
    "SELECT min(id) AS id, g, sum(f) AS f, first_value(v) AS v FROM ({a}) GROUP BY g, id % {n}0",
    "SELECT max(id) AS id, count(*) AS g, avg(f) AS f, v FROM ({a}) GROUP BY v",
    "SELECT max(id) AS id, count(*) AS g, sum(g) * 0.3 AS f, [max(id) * 0.5, min(g), 1.0] AS v FROM ({a}) GROUP BY id % {n}0",
    "SELECT id, row_number() OVER (PARTITION BY g ORDER BY id % {n}) AS g, f, v FROM ({a})",
    "SELECT id, g, sum(f) OVER (ORDER BY g ROWS {n} PRECEDING) AS f, v FROM ({a})",
    "SELECT * FROM ({a}) LIMIT {n}00 OFFSET {n}",
    "SELECT * FROM ({a}) ORDER BY g LIMIT {n}00",
    "SELECT * FROM ({a}) ORDER BY g, id % {n}",
    "SELECT * FROM ({a}) OFFSET {n}0",
    "SELECT * FROM ({a}) WHERE g <> {n} LIMIT {n}00",
    "SELECT k AS id, m AS g, m * 0.5 AS f, [m, k, 1.0] AS v FROM (SELECT id % 40 AS k, \
     min(id % 3) AS m FROM ({a}) GROUP BY id % 40 ORDER BY m LIMIT 1{n})",
    "SELECT min(id) AS id, min(g) AS g, max(f) AS f, v FROM (SELECT id, g, f, \
     CASE WHEN id % {n} = 0 THEN [0.0, g, 1.0] ELSE [-0.0, g, 1.0] END AS v FROM ({a})) GROUP BY v",
    "SELECT id, g + {n} AS g, f * g AS f, v FROM ({a}) LIMIT 5{n}0",
    "SELECT id, s['g'] AS g, s['f'] AS f, s['v'] AS v FROM \
     (SELECT id, named_struct('g', g, 'f', f, 'v', v) AS s FROM ({a}) LIMIT {n}000)",
    "SELECT id, g, f, v FROM (SELECT *, lag(f) OVER (PARTITION BY g ORDER BY id) AS before \
     FROM ({a})) WHERE before IS NOT NULL",
    "SELECT id, g, f, v FROM kmeans(({a}), k => 2, seed => {n}, vector => 'v')",
];

const TWO: &[&str] = &[
    "SELECT a.id, a.g, b.f, a.v FROM ({a}) AS a JOIN ({b}) AS b ON a.id = b.id + 5000",
    "SELECT * FROM ({a}) WHERE id IN (SELECT id * 20 FROM ({b}))",
    "SELECT * FROM ({a}) EXCEPT SELECT * FROM ({b})",
    "SELECT a.id, b.g, a.f, b.v FROM (SELECT * FROM ({a}) LIMIT 30) AS a, \
     (SELECT * FROM ({b}) LIMIT 40) AS b WHERE a.g <= b.g",
    "SELECT * FROM ({a}) UNION ALL SELECT * FROM ({b})",
    "SELECT * FROM (SELECT a.id, a.g, b.f, b.v FROM ({a}) AS a JOIN ({b}) AS b \
     ON a.id % 500 = b.id) LIMIT 9000",
    "SELECT * FROM (SELECT a.id, a.g, a.f, a.v FROM ({a}) AS a LEFT JOIN ({b}) AS b \
     ON a.id % 500 = b.id AND b.g < 3) LIMIT 9000",
    "SELECT * FROM (SELECT b.id, b.g, b.f, b.v FROM ({a}) AS a RIGHT JOIN ({b}) AS b \
     ON a.id = b.id) LIMIT 9000",
    "SELECT * FROM (SELECT coalesce(a.id, b.id) AS id, a.g, b.f, coalesce(a.v, b.v) AS v \
     FROM ({a}) AS a FULL JOIN ({b}) AS b ON a.id = b.id) LIMIT 9000",
    "SELECT * FROM ({a}) WHERE id IN (SELECT id FROM ({b}))",
    "SELECT * FROM ({a}) WHERE f > (SELECT avg(f) FROM ({b}))",
    "SELECT * FROM ({a}) WHERE NOT EXISTS (SELECT 1 FROM ({b}) AS b WHERE b.id = id + 3)",
];

pub async fn all() -> Result<(), Failed> {
    let stored = Stored::all().await?;
    // More inputs on request.
    let cases = std::env::var("PROPTEST_CASES").map_or(Ok(64), |cases| cases.parse())?;
    let config =
        Config { cases, max_shrink_iters: 60, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let handle = Handle::current();
    let holds = |input: String| {
        let compared = block_in_place(|| handle.block_on(compare(&stored, "", &input)));
        let Err(failed) = compared.map_err(|failed| format!("{failed:?}")) else { return Ok(()) };
        // Some inputs have too few rows for the clusters, and DataFusion cannot plan some.
        let alone = block_in_place(|| handle.block_on(stored[0].whole(&input)));
        match failed.contains("distinct vectors") || alone.is_err() {
            true => Ok(()),
            false => Err(TestCaseError::fail(failed)),
        }
    };
    match runner.run(&inputs(), holds) {
        Ok(()) => Ok(()),
        Err(TestError::Fail(why, input)) => Err(format!("{input}\n{why}").into()),
        Err(TestError::Abort(why)) => Err(format!("{why}").into()),
    }
}
