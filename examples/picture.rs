//! Step 8 of `sql/tour.sql` as a picture: two half-moons, each in the colour of its cluster, core points
//! full and border points as rings, noise in grey.
//!
//! ```text
//! cargo run --example picture        # writes target/moons.svg
//! ```

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{Float64Type, Int64Type};
use datafusion::error::{DataFusionError, Result};
use datafusion::prelude::SessionContext;
use plotters::prelude::*;

const PATH: &str = "target/moons.svg";

#[tokio::main]
async fn main() -> Result<()> {
    let ctx = SessionContext::new();
    datafusion_neighbors::register_all(&ctx)?;
    let tour = std::fs::read_to_string("sql/tour.sql")?;
    let step = tour.lines().skip_while(|line| !line.starts_with("-- 8. "));
    let step = step.take_while(|line| !line.starts_with("-- 9. "));
    let step = step.filter(|line| !line.starts_with("--")).collect::<Vec<_>>().join("\n");
    for statement in step.split(';').filter(|statement| !statement.trim().is_empty()) {
        ctx.sql(statement).await?.collect().await?;
    }
    let points = ctx.sql("SELECT x, y, cluster_id, core FROM moon_clusters").await?;
    std::fs::create_dir_all("target")?;
    draw(&points.collect().await?).map_err(|error| DataFusionError::External(error.into()))?;
    println!("{PATH}");
    Ok(())
}

/// Draws the points of batches with their coordinates, cluster and core flag.
fn draw(batches: &[RecordBatch]) -> std::result::Result<(), String> {
    let area = SVGBackend::new(PATH, (720, 450)).into_drawing_area();
    let error = |error: DrawingAreaErrorKind<_>| error.to_string();
    area.fill(&WHITE).map_err(error)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(10)
        .build_cartesian_2d(-1.7..2.7, -1.2..1.7)
        .map_err(error)?;
    for batch in batches {
        let number = |i: usize| batch.column(i).as_primitive::<Float64Type>();
        let clusters = batch.column(2).as_primitive::<Int64Type>();
        let core = batch.column(3).as_boolean();
        let points = number(0).values().iter().zip(number(1).values()).enumerate();
        let circles = points.map(|(row, (x, y))| {
            let colour = if clusters.is_null(row) {
                BLACK.mix(0.3)
            } else {
                Palette99::pick(clusters.value(row) as usize).to_rgba()
            };
            let style = if core.value(row) { colour.filled() } else { colour.stroke_width(1) };
            Circle::new((*x, *y), 3, style)
        });
        chart.draw_series(circles).map_err(error)?;
    }
    area.present().map_err(error)
}
