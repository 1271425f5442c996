//! What people and programs read: tables and colours for the ones, lines of JSON
//! for the others.

use std::io::Write as _;
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;

/// For headings.
pub(crate) const BOLD: Style = Style::new().bold();
/// For what is held.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
/// For what needs a look.
pub(crate) const BAD: Style = AnsiColor::Red.on_default();
/// For what matters less.
pub(crate) const DIM: Style = Style::new().dimmed();

/// A text in a style; [`print`] leaves the style out where it does not belong.
pub(crate) fn styled(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}

/// A line on standard output, in colours only for a terminal without `NO_COLOR`.
/// A reader that has gone away is no fault.
pub(crate) fn print(line: impl std::fmt::Display) {
    let _ = writeln!(anstream::stdout(), "{line}");
}

/// A line on standard error.
pub(crate) fn warn(line: impl std::fmt::Display) {
    let _ = writeln!(anstream::stderr(), "dlock: {line}");
}

/// One line of JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    print(serde_json::to_string(value)?);
    Ok(())
}

/// A table without frames; the columns named in `numbers` stand right.
pub(crate) fn table(heads: &[&str], numbers: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(heads.iter().map(Cell::new));
    for (place, head) in heads.iter().enumerate() {
        let Some(column) = table.column_mut(place) else { continue };
        column.set_padding((if place == 0 { 0 } else { 1 }, 1));
        if numbers.contains(head) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A duration in the two largest units, from milliseconds up.
pub(crate) fn short(duration: Duration) -> String {
    let millis = Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    if millis.is_zero() {
        return "0s".into();
    }
    let text = humantime::format_duration(millis).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// A number with a thin mark every three digits.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Microseconds in the unit that fits.
pub(crate) fn latency(micros: f64) -> String {
    match micros {
        slow if slow >= 1_000_000.0 => format!("{:.2} s", slow / 1_000_000.0),
        slow if slow >= 1_000.0 => format!("{:.2} ms", slow / 1_000.0),
        fast => format!("{fast:.1} µs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(123), "123");
        assert_eq!(short(Duration::from_micros(1)), "0s");
        assert_eq!(short(Duration::from_millis(61_234)), "1m 1s");
        assert_eq!(latency(12.34), "12.3 µs");
        assert_eq!(latency(1_234.0), "1.23 ms");
        assert_eq!(latency(2_500_000.0), "2.50 s");
    }
}
