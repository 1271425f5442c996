//! Printing: tables and colours for people, lines of JSON for programs.

use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;
use serde::de::{MapAccess, Visitor};

/// The style of headings.
pub(crate) const BOLD: Style = Style::new().bold();
/// The style of what is held or in order.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
/// The style of what needs attention.
pub(crate) const BAD: Style = AnsiColor::Red.on_default();
/// The style of what matters less.
pub(crate) const DIM: Style = Style::new().dimmed();

/// A string in a style; [`print`] removes the style if the output has no colours.
pub(crate) fn styled(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}

/// Prints a line on standard output, in colours only on a terminal without `NO_COLOR`.
pub(crate) fn print(line: impl std::fmt::Display) {
    print_bytes(format!("{line}\n").as_bytes());
}

/// Prints bytes on standard output without adding a line end.
pub(crate) fn print_bytes(text: &[u8]) {
    let mut output = anstream::stdout();
    if let Err(error) = output.write_all(text).and_then(|()| output.flush()) {
        first_write_error().get_or_insert(error);
    }
}

/// The first error of writing to standard output.
fn first_write_error() -> MutexGuard<'static, Option<std::io::Error>> {
    static ERROR: Mutex<Option<std::io::Error>> = Mutex::new(None);
    ERROR.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether standard output can no longer be written, so that the command should end.
pub(crate) fn is_closed() -> bool {
    first_write_error().is_some()
}

/// The error of writing to standard output. A reader that has gone away is not an error.
pub(crate) fn write_error() -> Option<std::io::Error> {
    first_write_error().take().filter(|error| error.kind() != std::io::ErrorKind::BrokenPipe)
}

/// Prints a line on standard error.
pub(crate) fn warn(line: impl std::fmt::Display) {
    let _ = writeln!(anstream::stderr(), "dlock: {line}");
}

/// Prints one line of JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    print(serde_json::to_string(value)?);
    Ok(())
}

/// The fields that `--json` prints, in the same order.
pub(crate) fn fields(value: &impl Serialize) -> Result<Vec<(String, serde_json::Value)>> {
    struct Fields(Vec<(String, serde_json::Value)>);

    impl<'de> serde::Deserialize<'de> for Fields {
        fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            from.deserialize_map(InOrder)
        }
    }

    struct InOrder;

    impl<'de> Visitor<'de> for InOrder {
        type Value = Fields;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
            let mut fields = Vec::new();
            while let Some(field) = map.next_entry()? {
                fields.push(field);
            }
            Ok(Fields(fields))
        }
    }

    let Fields(fields) = serde_json::from_str(&serde_json::to_string(value)?)?;
    Ok(fields)
}

/// A table without borders; the columns in `right_aligned` are aligned to the right.
pub(crate) fn table(headers: &[&str], right_aligned: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(headers.iter().map(Cell::new));
    for (index, header) in headers.iter().enumerate() {
        let Some(column) = table.column_mut(index) else { continue };
        column.set_padding((if index == 0 { 0 } else { 1 }, 1));
        if right_aligned.contains(header) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A duration in its two largest units, but not smaller than milliseconds.
pub(crate) fn short(duration: Duration) -> String {
    let millis = Duration::from_millis(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    if millis.is_zero() {
        return "0s".into();
    }
    let text = humantime::format_duration(millis).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

/// A number with a comma every three digits.
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

/// A time in microseconds, printed in the unit that fits.
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
