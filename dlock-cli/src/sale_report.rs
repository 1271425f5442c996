//! The report of a sale: one HTML file that contains its charts.
//!
//! The charts have no background and use the text colour of the page, so that they are
//! readable on a light and on a dark page.

use anyhow::{Result, anyhow};
use dlock_bench::workload::sale::{Plan, SaleResult};
use plotters::prelude::*;
use plotters::style::RGBAColor;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::output::{grouped, latency};
use crate::sale;

const SIZE: (u32, u32) = (720, 340);
/// Readable on white and on black.
const COLOURS: [RGBColor; 4] =
    [RGBColor(214, 92, 46), RGBColor(44, 132, 190), RGBColor(38, 150, 92), RGBColor(150, 98, 196)];
/// The colour of axes and text while plotters draws; [`chart_svg`] replaces it by the text
/// colour of the page.
const TEXT_COLOUR: RGBColor = RGBColor(1, 2, 3);

/// The HTML page.
pub(crate) fn page(
    plan: &Plan,
    results: &[SaleResult],
    throughput_by_segments: &[(u32, f64)],
) -> Result<String> {
    let mut charts = vec![
        ("Orders per second of each method", throughput(results)?),
        ("Share of the orders that were answered within a time", latencies(results)?),
    ];
    for (name, title) in [
        ("segmented-lock", "Stock per segment over time, segmented lock"),
        ("inventory", "Stock per segment over time, inventory"),
    ] {
        if let Some(result) = results.iter().find(|result| result.outcome.method.name() == name) {
            charts.push((title, stock_over_time(result)?));
        }
    }
    charts.push((
        "Orders per second by number of segments, segmented lock",
        segment_comparison(throughput_by_segments)?,
    ));
    let figures: String = charts
        .into_iter()
        .map(|(title, svg)| format!("<figure><figcaption>{title}</figcaption>{svg}</figure>\n"))
        .collect();
    let seller = &plan.seller;
    let backend = dlock_bench::server::backend(&seller.backend);
    let about = format!(
        "{} units in {} segments, {} buyers who want {} to {} units each, {} at the same time, {} per order, on {backend}",
        grouped(seller.stock),
        seller.segments,
        grouped(plan.buyers),
        plan.quantity.0,
        plan.quantity.1,
        grouped(seller.at_once as u64),
        humantime::format_duration(seller.think),
    );
    Ok(include_str!("sale_report.html")
        .replace("<!-- about -->", &about)
        .replace("<!-- rows -->", &rows(results))
        .replace("<!-- figures -->", &figures))
}

fn rows(results: &[SaleResult]) -> String {
    let row = |result: &SaleResult| {
        let outcome = &result.outcome;
        let cells: String =
            sale::cells(outcome).iter().map(|cell| format!("<td>{cell}</td>")).collect();
        format!("<tr><th scope=\"row\">{}</th>{cells}</tr>\n", outcome.method.name())
    };
    results.iter().map(row).collect()
}

/// Draws a chart as SVG and replaces [`TEXT_COLOUR`] by the text colour of the page.
fn chart_svg(draw: impl FnOnce(&Canvas<'_>) -> Result<(), String>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw(&area).map_err(|error| anyhow!("a chart could not be drawn: {error}"))?;
        area.present().map_err(|error| anyhow!("a chart could not be drawn: {error}"))?;
    }
    // The page sets the width, and the view box keeps the proportions.
    let own_size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
    Ok(svg.replace("#010203", "currentColor").replacen(&own_size, "", 1))
}

fn text_style() -> TextStyle<'static> {
    ("sans-serif", 13).into_font().color(&TEXT_COLOUR)
}

fn message(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn line_colour() -> RGBAColor {
    TEXT_COLOUR.mix(0.15)
}

type Canvas<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// A chart with room for its axes.
fn chart_builder<'a, 'b>(area: &'a Canvas<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut chart = ChartBuilder::on(area);
    chart.margin(8).x_label_area_size(36).y_label_area_size(72);
    chart
}

/// The axes and grid lines that all charts have.
macro_rules! mesh {
    ($chart:ident) => {
        $chart
            .configure_mesh()
            .axis_style(TEXT_COLOUR)
            .light_line_style(TRANSPARENT)
            .bold_line_style(line_colour())
            .label_style(text_style())
    };
}

fn throughput(results: &[SaleResult]) -> Result<String> {
    let most = results.iter().map(|result| result.outcome.ops_per_s).fold(1.0, f64::max) * 1.15;
    chart_svg(|area| {
        let mut chart = chart_builder(area)
            .build_cartesian_2d(0.0..results.len() as f64, 0.0..most)
            .map_err(message)?;
        mesh!(chart)
            .disable_x_mesh()
            .disable_x_axis()
            .y_labels(6)
            .y_label_formatter(&|orders| grouped(*orders as u64))
            .draw()
            .map_err(message)?;
        let middle = Pos::new(HPos::Center, VPos::Bottom);
        for (index, (result, colour)) in results.iter().zip(COLOURS).enumerate() {
            let (x, orders) = (index as f64, result.outcome.ops_per_s);
            let bar = Rectangle::new([(x + 0.2, 0.0), (x + 0.8, orders)], colour.filled());
            let label = format!("{} {}/s", result.outcome.method.name(), grouped(orders as u64));
            let above = (x + 0.5, orders + most * 0.02);
            chart.draw_series([bar]).map_err(message)?;
            chart
                .draw_series([Text::new(label, above, text_style().pos(middle))])
                .map_err(message)?;
        }
        Ok(())
    })
}

fn latencies(results: &[SaleResult]) -> Result<String> {
    let of = |result: &SaleResult| {
        let mut all = result.measured.latencies.clone();
        all.sort_unstable();
        let (mut within, total) = (0, result.measured.operations.max(1) as f64);
        all.into_iter()
            .map(|(nanos, count)| {
                within += count;
                ((nanos as f64 / 1e6).max(1e-4), within as f64 / total * 100.0)
            })
            .collect::<Vec<_>>()
    };
    let lines: Vec<Vec<(f64, f64)>> = results.iter().map(of).collect();
    let times = || lines.iter().flatten().map(|point| point.0);
    let (least, most) = (times().fold(f64::INFINITY, f64::min), times().fold(1e-3, f64::max));
    let range = (least.min(most / 10.0).max(1e-4)..most * 1.2).log_scale();
    chart_svg(|area| {
        let mut chart =
            chart_builder(area).build_cartesian_2d(range, 0.0..100.0).map_err(message)?;
        mesh!(chart)
            .x_label_formatter(&|millis| latency(millis * 1_000.0))
            .y_label_formatter(&|percent| format!("{percent:.0} %"))
            .draw()
            .map_err(message)?;
        for ((result, line), colour) in results.iter().zip(lines).zip(COLOURS) {
            chart
                .draw_series(LineSeries::new(line, colour.stroke_width(2)))
                .map_err(message)?
                .label(result.outcome.method.name())
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 4), (x + 14, y + 4)], colour.filled())
                });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .border_style(TRANSPARENT)
            .label_font(text_style())
            .draw()
            .map_err(message)
    })
}

fn stock_over_time(result: &SaleResult) -> Result<String> {
    let last = result.timeline.last().map_or(1.0, |sample| sample.0).max(1e-3);
    let most =
        result.timeline.iter().flat_map(|sample| sample.1.iter().copied()).max().unwrap_or(1);
    let count = result.timeline.last().map_or(0, |sample| sample.1.len());
    // About a hundred samples are enough for a chart.
    let step = result.timeline.len().div_ceil(100).max(1);
    chart_svg(|area| {
        let mut chart = chart_builder(area)
            .build_cartesian_2d(0.0..last, 0.0..most.max(1) as f64 * 1.05)
            .map_err(message)?;
        mesh!(chart)
            .x_label_formatter(&|seconds| latency(seconds * 1e6))
            .y_label_formatter(&|units| grouped(*units as u64))
            .draw()
            .map_err(message)?;
        for segment in 0..count {
            let colour = HSLColor(segment as f64 / count as f64, 0.55, 0.5);
            let line = result
                .timeline
                .iter()
                .rev() // so that the last sample is included
                .step_by(step)
                .filter_map(|(at, left)| Some((*at, *left.get(segment)? as f64)));
            chart.draw_series(LineSeries::new(line, colour.stroke_width(1))).map_err(message)?;
        }
        Ok(())
    })
}

fn segment_comparison(throughput_by_segments: &[(u32, f64)]) -> Result<String> {
    let most = throughput_by_segments.iter().map(|point| point.1).fold(1.0, f64::max) * 1.15;
    let last = throughput_by_segments.last().map_or(1, |point| point.0);
    let points: Vec<(f64, f64)> = throughput_by_segments
        .iter()
        .map(|&(segments, orders)| (f64::from(segments), orders))
        .collect();
    chart_svg(|area| {
        let mut chart = chart_builder(area)
            .build_cartesian_2d(0.0..f64::from(last) * 1.05, 0.0..most)
            .map_err(message)?;
        mesh!(chart)
            .x_desc("segments")
            .x_label_formatter(&|segments| format!("{segments:.0}"))
            .y_label_formatter(&|orders| grouped(*orders as u64))
            .axis_desc_style(text_style())
            .draw()
            .map_err(message)?;
        let line = LineSeries::new(points.iter().copied(), COLOURS[1].stroke_width(2));
        chart.draw_series(line).map_err(message)?;
        let dots = points.iter().map(|&point| Circle::new(point, 4, COLOURS[1].filled()));
        chart.draw_series(dots).map_err(message)?;
        Ok(())
    })
}
