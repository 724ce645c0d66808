-- A tour of `knn_exact`, `knn_lsh`, `kmeans` and `dbscan`. Most of it is on real data: 1,797 handwritten digits,
-- each a picture of 8 x 8 pixels.
-- Run it in the root of the repository:  neighbors -f sql/tour.sql
--
-- A table with the column `step` says what the next one shows.

-- 1. The data. `pixels` is the vector: 64 counts of ink from 0 to 16, row by row; here is one row of each picture.
SELECT '1. The data: 1,797 handwritten digits as 8 x 8 pixels, and here the third row of three of them' AS step;
SELECT id, label, pixels[17:24] AS third_row FROM 'sql/data/digits.parquet' ORDER BY id LIMIT 3;

-- A file can be read by its path, as above, or be given a name.
CREATE EXTERNAL TABLE digits STORED AS PARQUET LOCATION 'sql/data/digits.parquet';

SELECT 'How many pictures there are of each digit' AS step;
SELECT label, count(*) AS pictures FROM digits GROUP BY label ORDER BY label;

-- 2. Every fifth picture becomes a question; the others, whose labels we may look at, the base.
CREATE VIEW test AS SELECT * FROM digits WHERE id % 5 = 0;
CREATE VIEW train AS SELECT * FROM digits WHERE id % 5 <> 0;

-- 3. The five nearest pictures of each test picture. The only vector column is found by itself;
--    the other columns of both sides come along, prefixed: query_id, query_label, base_id, base_label.
CREATE TABLE nearest AS SELECT * FROM knn_exact(queries => test, base => train, k => 5);

SELECT '2 and 3. knn_exact: for every fifth picture the 5 nearest of the others, and here for a zero and a five' AS step;
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

SELECT '4. Guessing 360 labels by the vote of the 5 neighbours' AS step;
SELECT count(*) AS pictures,
       count(*) FILTER (WHERE guess = label) AS right_guesses,
       round(100.0 * count(*) FILTER (WHERE guess = label) / count(*), 2) AS accuracy_percent
FROM guesses;

-- 5. The pictures it got wrong.
SELECT '5. The wrong guesses' AS step;
SELECT id, label, guess, votes FROM guesses WHERE guess <> label ORDER BY id;

-- 6. A relation with itself: without `queries`, every row asks for its neighbours among the others.
--    How often does the most similar other picture show the same digit?
SELECT '6. knn_exact without queries: is the nearest other picture the same digit?' AS step;
SELECT query_label AS label,
       count(*) AS pictures,
       count(*) FILTER (WHERE base_label = query_label) AS same_digit,
       round(100.0 * count(*) FILTER (WHERE base_label = query_label) / count(*), 2) AS percent
FROM knn_exact(base => digits, k => 1)
GROUP BY query_label
ORDER BY query_label;

-- 7. Ten clusters of pictures, found without looking at the labels. How pure are they?
CREATE TABLE clustered AS SELECT id, label, cluster_id FROM kmeans(digits, k => 10, seed => 7);

SELECT '7. kmeans: 10 clusters found without the labels, and how pure they are' AS step;
SELECT cluster_id,
       sum(n) AS pictures,
       first_value(label ORDER BY n DESC, label) AS most_common_label,
       round(100.0 * max(n) / sum(n), 1) AS purity_percent
FROM (SELECT label, cluster_id, count(*) AS n FROM clustered GROUP BY label, cluster_id)
GROUP BY cluster_id
ORDER BY cluster_id;

-- 8. Shapes that k-means cannot see: two half-moons of 400 and 380 points, one inside the other's bow, and 20 points
--    anywhere. `cargo run --example picture` draws this step.
CREATE TABLE moons AS
WITH numbers AS (
  SELECT value AS id, pi() * value / 800 AS angle, sin(value * 12.9898) * 43758.5453 AS a, sin(value * 78.233) * 43758.5453 AS b
  FROM generate_series(0, 799)
), points AS (
  SELECT id, angle, a - floor(a) AS a, b - floor(b) AS b FROM numbers
)
SELECT id,
       CASE WHEN id % 40 = 39 THEN NULL ELSE id % 2 END AS moon,
       CASE WHEN id % 40 = 39 THEN 4 * a - 1.5 WHEN id % 2 = 0 THEN cos(angle) ELSE 1 - cos(angle) END + 0.16 * (a - 0.5) AS x,
       CASE WHEN id % 40 = 39 THEN 2.5 * b - 1 WHEN id % 2 = 0 THEN sin(angle) ELSE 0.5 - sin(angle) END + 0.16 * (b - 0.5) AS y
FROM points;

CREATE TABLE moon_clusters AS
SELECT id, moon, x, y, cluster_id, core FROM dbscan(moons, eps => 0.12, min_points => 5, vector => ['x', 'y']);

SELECT '8. dbscan: each half-moon is a cluster, and most of the other points are noise, without cluster_id' AS step;
SELECT moon, cluster_id, count(*) AS points FROM moon_clusters GROUP BY moon, cluster_id ORDER BY moon, cluster_id;

SELECT 'kmeans cuts through both half-moons' AS step;
SELECT moon, cluster_id, count(*) AS points FROM kmeans(moons, k => 2, vector => ['x', 'y']) GROUP BY moon, cluster_id ORDER BY moon, cluster_id;

-- 9. Most of the neighbours without comparing all: hashing, with what it finds and by how much the rest is farther.
CREATE TABLE exact AS SELECT query_id, rank, distance FROM knn_exact(base => digits, k => 5);
CREATE TABLE hashed AS SELECT query_id, rank, distance FROM knn_lsh(base => digits, k => 5, recall => 0.9, seed => 7);

SELECT '9. knn_lsh: how many of the neighbours hashing finds, and how much farther its neighbours are' AS step;
SELECT round(100.0 * (SELECT count(*) FROM hashed h JOIN exact e ON h.query_id = e.query_id AND e.rank = 5 WHERE h.distance <= e.distance)
             / (SELECT count(*) FROM exact), 1) AS recall_percent,
       round(100.0 * (sum(h.distance) / sum(e.distance) - 1), 2) AS deviation_percent
FROM hashed h JOIN exact e ON h.query_id = e.query_id AND h.rank = e.rank;
