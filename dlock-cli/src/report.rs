//! The report of a sale: one HTML file with its pictures inside.
//!
//! The pictures are drawn on nothing and in the colour of the text around them,
//! so that they are readable on a light and on a dark page.

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
/// What plotters writes for the axes and the text; the page's own colour takes its place.
const INK: RGBColor = RGBColor(1, 2, 3);

/// The page.
pub(crate) fn page(plan: &Plan, played: &[SaleResult], curve: &[(u32, f64)]) -> Result<String> {
    let mut pictures = vec![
        ("Orders a second, by method", throughput(played)?),
        ("How many orders were answered within which time", latencies(played)?),
    ];
    for (name, title) in [
        ("segmented-lock", "Stock per segment over time, segmented lock"),
        ("inventory", "Stock per segment over time, inventory"),
    ] {
        if let Some(one) = played.iter().find(|one| one.outcome.method.name() == name) {
            pictures.push((title, segments(one)?));
        }
    }
    pictures
        .push(("Orders a second over the number of segments, segmented lock", by_segments(curve)?));
    let figures: String = pictures
        .into_iter()
        .map(|(title, svg)| format!("<figure><figcaption>{title}</figcaption>{svg}</figure>\n"))
        .collect();
    let stall = &plan.seller;
    let backend = dlock_bench::server::backend(&stall.backend);
    let about = format!(
        "{} units in {} segments, {} buyers who want {} to {} each, {} at the same time, {} to think about an order, on {backend}",
        grouped(stall.stock),
        stall.segments,
        grouped(plan.buyers),
        plan.quantity.0,
        plan.quantity.1,
        grouped(stall.at_once as u64),
        humantime::format_duration(stall.think),
    );
    Ok(include_str!("report.html")
        .replace("<!-- about -->", &about)
        .replace("<!-- rows -->", &rows(played))
        .replace("<!-- figures -->", &figures))
}

fn rows(played: &[SaleResult]) -> String {
    let row = |one: &SaleResult| {
        let outcome = &one.outcome;
        let cells: String =
            sale::cells(outcome).iter().map(|cell| format!("<td>{cell}</td>")).collect();
        format!("<tr><th scope=\"row\">{}</th>{cells}</tr>\n", outcome.method.name())
    };
    played.iter().map(row).collect()
}

/// Draws on an SVG and lets the page's colour take the ink's place.
fn picture(draw: impl FnOnce(&Paper<'_>) -> Result<(), String>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw(&area).map_err(|fault| anyhow!("a picture could not be drawn: {fault}"))?;
        area.present().map_err(|fault| anyhow!("a picture could not be drawn: {fault}"))?;
    }
    // It is given the width of the page, and its proportions by the view box.
    let own_size = format!("width=\"{}\" height=\"{}\" ", SIZE.0, SIZE.1);
    Ok(svg.replace("#010203", "currentColor").replacen(&own_size, "", 1))
}

fn text() -> TextStyle<'static> {
    ("sans-serif", 13).into_font().color(&INK)
}

fn words(fault: impl std::fmt::Display) -> String {
    fault.to_string()
}

fn faint() -> RGBAColor {
    INK.mix(0.15)
}

type Paper<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Room for a chart and its axes.
fn frame<'a, 'b>(area: &'a Paper<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut chart = ChartBuilder::on(area);
    chart.margin(8).x_label_area_size(36).y_label_area_size(72);
    chart
}

/// Axes and lines as every chart has them.
macro_rules! mesh {
    ($chart:ident) => {
        $chart
            .configure_mesh()
            .axis_style(INK)
            .light_line_style(TRANSPARENT)
            .bold_line_style(faint())
            .label_style(text())
    };
}

fn throughput(played: &[SaleResult]) -> Result<String> {
    let most = played.iter().map(|one| one.outcome.ops_per_s).fold(1.0, f64::max) * 1.15;
    picture(|area| {
        let mut chart =
            frame(area).build_cartesian_2d(0.0..played.len() as f64, 0.0..most).map_err(words)?;
        mesh!(chart)
            .disable_x_mesh()
            .disable_x_axis()
            .y_labels(6)
            .y_label_formatter(&|orders| grouped(*orders as u64))
            .draw()
            .map_err(words)?;
        let middle = Pos::new(HPos::Center, VPos::Bottom);
        for (place, (one, colour)) in played.iter().zip(COLOURS).enumerate() {
            let (place, orders) = (place as f64, one.outcome.ops_per_s);
            let bar = Rectangle::new([(place + 0.2, 0.0), (place + 0.8, orders)], colour.filled());
            let label = format!("{} {}/s", one.outcome.method.name(), grouped(orders as u64));
            let above = (place + 0.5, orders + most * 0.02);
            chart.draw_series([bar]).map_err(words)?;
            chart.draw_series([Text::new(label, above, text().pos(middle))]).map_err(words)?;
        }
        Ok(())
    })
}

fn latencies(played: &[SaleResult]) -> Result<String> {
    let of = |one: &SaleResult| {
        let mut all = one.measured.latencies.clone();
        all.sort_unstable();
        let (mut within, total) = (0, one.measured.operations.max(1) as f64);
        all.into_iter()
            .map(|(nanos, count)| {
                within += count;
                ((nanos as f64 / 1e6).max(1e-4), within as f64 / total * 100.0)
            })
            .collect::<Vec<_>>()
    };
    let lines: Vec<Vec<(f64, f64)>> = played.iter().map(of).collect();
    let times = || lines.iter().flatten().map(|point| point.0);
    let (least, most) = (times().fold(f64::INFINITY, f64::min), times().fold(1e-3, f64::max));
    let range = (least.min(most / 10.0).max(1e-4)..most * 1.2).log_scale();
    picture(|area| {
        let mut chart = frame(area).build_cartesian_2d(range, 0.0..100.0).map_err(words)?;
        mesh!(chart)
            .x_label_formatter(&|millis| latency(millis * 1_000.0))
            .y_label_formatter(&|percent| format!("{percent:.0} %"))
            .draw()
            .map_err(words)?;
        for ((one, line), colour) in played.iter().zip(lines).zip(COLOURS) {
            chart
                .draw_series(LineSeries::new(line, colour.stroke_width(2)))
                .map_err(words)?
                .label(one.outcome.method.name())
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 4), (x + 14, y + 4)], colour.filled())
                });
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .border_style(TRANSPARENT)
            .label_font(text())
            .draw()
            .map_err(words)
    })
}

fn segments(one: &SaleResult) -> Result<String> {
    let last = one.timeline.last().map_or(1.0, |look| look.0).max(1e-3);
    let most = one.timeline.iter().flat_map(|look| look.1.iter().copied()).max().unwrap_or(1);
    let count = one.timeline.last().map_or(0, |look| look.1.len());
    // Some hundred looks are enough for a picture.
    let looks = one.timeline.len().div_ceil(100).max(1);
    picture(|area| {
        let mut chart = frame(area)
            .build_cartesian_2d(0.0..last, 0.0..most.max(1) as f64 * 1.05)
            .map_err(words)?;
        mesh!(chart)
            .x_label_formatter(&|seconds| latency(seconds * 1e6))
            .y_label_formatter(&|units| grouped(*units as u64))
            .draw()
            .map_err(words)?;
        for segment in 0..count {
            let colour = HSLColor(segment as f64 / count as f64, 0.55, 0.5);
            let line = one
                .timeline
                .iter()
                .rev() // so that the last one is among them
                .step_by(looks)
                .filter_map(|(at, left)| Some((*at, *left.get(segment)? as f64)));
            chart.draw_series(LineSeries::new(line, colour.stroke_width(1))).map_err(words)?;
        }
        Ok(())
    })
}

fn by_segments(curve: &[(u32, f64)]) -> Result<String> {
    let most = curve.iter().map(|point| point.1).fold(1.0, f64::max) * 1.15;
    let last = curve.last().map_or(1, |point| point.0);
    let points: Vec<(f64, f64)> =
        curve.iter().map(|&(segments, orders)| (f64::from(segments), orders)).collect();
    picture(|area| {
        let mut chart = frame(area)
            .build_cartesian_2d(0.0..f64::from(last) * 1.05, 0.0..most)
            .map_err(words)?;
        mesh!(chart)
            .x_desc("segments")
            .x_label_formatter(&|segments| format!("{segments:.0}"))
            .y_label_formatter(&|orders| grouped(*orders as u64))
            .axis_desc_style(text())
            .draw()
            .map_err(words)?;
        let line = LineSeries::new(points.iter().copied(), COLOURS[1].stroke_width(2));
        chart.draw_series(line).map_err(words)?;
        let dots = points.iter().map(|&point| Circle::new(point, 4, COLOURS[1].filled()));
        chart.draw_series(dots).map_err(words)?;
        Ok(())
    })
}
