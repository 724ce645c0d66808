-- A tour of `knn_exact` and `kmeans` on real data: 1,797 handwritten digits, each a picture of 8 x 8 pixels.
-- Run it in the root of the repository:  neighbors -f sql/tour.sql

-- 1. The data. `pixels` is the vector: 64 counts of ink from 0 to 16, row by row; here is one row of each picture.
SELECT id, label, pixels[17:24] AS third_row FROM 'sql/data/digits.parquet' ORDER BY id LIMIT 3;

-- A file can be read by its path, as above, or be given a name.
CREATE EXTERNAL TABLE digits STORED AS PARQUET LOCATION 'sql/data/digits.parquet';

SELECT label, count(*) AS pictures FROM digits GROUP BY label ORDER BY label;

-- 2. Every fifth picture becomes a question; the others, whose labels we may look at, the base.
CREATE VIEW test AS SELECT * FROM digits WHERE id % 5 = 0;
CREATE VIEW train AS SELECT * FROM digits WHERE id % 5 <> 0;

-- 3. The five nearest pictures of each test picture. The only vector column is found by itself;
--    the other columns of both sides come along, prefixed: query_id, query_label, base_id, base_label.
CREATE TABLE nearest AS SELECT * FROM knn_exact(queries => test, base => train, k => 5);

SELECT * FROM nearest WHERE query_id IN (0, 5) ORDER BY query_id, rank;

-- 4. Classify by the vote of the five: most votes first, then the smaller sum of distances.
CREATE VIEW votes AS
SELECT query_id, query_label, base_label, count(*) AS votes, sum(distance) AS distances
FROM nearest
GROUP BY query_id, query_label, base_label;

CREATE VIEW guesses AS
SELECT query_id AS id, query_label AS label, base_label AS guess, votes
FROM (
  SELECT *, row_number() OVER (PARTITION BY query_id ORDER BY votes DESC, distances, base_label) AS place
  FROM votes
)
WHERE place = 1;

SELECT count(*) AS pictures,
       count(*) FILTER (WHERE guess = label) AS right_guesses,
       round(100.0 * count(*) FILTER (WHERE guess = label) / count(*), 2) AS accuracy_percent
FROM guesses;

-- 5. The pictures it got wrong.
SELECT id, label, guess, votes FROM guesses WHERE guess <> label ORDER BY id;

-- 6. A relation with itself: without `queries`, every row asks for its neighbours among the others.
--    How often does the most similar other picture show the same digit?
SELECT query_label AS label,
       count(*) AS pictures,
       count(*) FILTER (WHERE base_label = query_label) AS same_digit,
       round(100.0 * count(*) FILTER (WHERE base_label = query_label) / count(*), 2) AS percent
FROM knn_exact(base => digits, k => 1)
GROUP BY query_label
ORDER BY query_label;

-- 7. Ten clusters of pictures, found without looking at the labels. How pure are they?
CREATE TABLE clustered AS SELECT id, label, cluster_id FROM kmeans(digits, k => 10, seed => 7);

SELECT cluster_id,
       sum(n) AS pictures,
       first_value(label ORDER BY n DESC, label) AS most_common_label,
       round(100.0 * max(n) / sum(n), 1) AS purity_percent
FROM (SELECT label, cluster_id, count(*) AS n FROM clustered GROUP BY label, cluster_id)
GROUP BY cluster_id
ORDER BY cluster_id;
