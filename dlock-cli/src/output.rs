//! What people and programs read: tables and colours for the ones, lines of JSON
//! for the others.

use std::io::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;
use serde::de::{MapAccess, Visitor};

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
pub(crate) fn print(line: impl std::fmt::Display) {
    print_bytes(format!("{line}\n").as_bytes());
}

/// The same of a text that has its own line ends.
pub(crate) fn print_bytes(text: &[u8]) {
    let mut output = anstream::stdout();
    if let Err(error) = output.write_all(text).and_then(|()| output.flush()) {
        let mut fault = fault();
        fault.get_or_insert(error);
    }
}

/// Why nothing more can be printed.
fn fault() -> MutexGuard<'static, Option<std::io::Error>> {
    static FAULT: Mutex<Option<std::io::Error>> = Mutex::new(None);
    FAULT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether nobody reads any more, so that there is no use in going on.
pub(crate) fn is_over() -> bool {
    fault().is_some()
}

/// What kept the output from being written; a reader that has gone away is no fault.
pub(crate) fn lost_output() -> Option<std::io::Error> {
    fault().take().filter(|error| error.kind() != std::io::ErrorKind::BrokenPipe)
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

/// The fields of what `--json` prints, in their order.
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
