//! Times on the command line: RFC 3339 with an offset, such as `2026-11-11T20:00:00+08:00`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, anyhow, bail};

/// Reads a time. The offset is needed: a time without one means another moment elsewhere.
pub(super) fn parse(text: &str) -> Result<SystemTime> {
    let example =
        "give a time with its offset, such as 2026-11-11T20:00:00+08:00 or 2026-11-11T12:00:00Z";
    let (local, offset) =
        split(text).ok_or_else(|| anyhow!("`{text}` has no offset; {example}"))?;
    let time = humantime::parse_rfc3339(&format!("{local}Z"));
    let time = time.with_context(|| format!("`{text}` is not a time; {example}"))?;
    let moved = match offset {
        0.. => time.checked_sub(Duration::from_secs(offset.unsigned_abs())),
        _ => time.checked_add(Duration::from_secs(offset.unsigned_abs())),
    };
    moved.filter(|time| *time >= UNIX_EPOCH).ok_or_else(|| anyhow!("`{text}` is before 1970"))
}

/// The local time, and its offset in seconds.
fn split(text: &str) -> Option<(&str, i64)> {
    if let Some(local) = text.strip_suffix(['Z', 'z']) {
        return Some((local, 0));
    }
    let at = text.len().checked_sub(6)?;
    let (local, offset) = (text.get(..at)?, text.get(at..)?);
    let sign = match offset.as_bytes()[0] {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let (hours, minutes) = offset[1..].split_once(':')?;
    let (hours, minutes) = (hours.parse::<u8>().ok()?, minutes.parse::<u8>().ok()?);
    (hours < 24 && minutes < 60)
        .then_some((local, sign * (i64::from(hours) * 3_600 + i64::from(minutes) * 60)))
}

/// A time or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bound(pub(super) Option<SystemTime>);

pub(super) fn parse_bound(text: &str) -> Result<Bound> {
    match text {
        "none" => Ok(Bound(None)),
        text => {
            if text.parse::<u64>().is_ok() {
                bail!(
                    "`{text}` is a number; give a time with its offset, such as 2026-11-11T20:00:00+08:00, or none"
                );
            }
            parse(text).map(|time| Bound(Some(time)))
        }
    }
}

/// Milliseconds of Unix time for people.
pub(super) fn shown(millis: u64) -> String {
    let time = UNIX_EPOCH + Duration::from_millis(millis);
    humantime::format_rfc3339_seconds(time).to_string()
}

pub(super) fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn of_millis(millis: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_needs_its_offset() {
        let seconds =
            |text: &str| parse(text).unwrap().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let noon = seconds("2026-11-11T12:00:00Z");
        assert_eq!(seconds("2026-11-11T20:00:00+08:00"), noon);
        assert_eq!(seconds("2026-11-11T06:30:00-05:30"), noon);
        assert_eq!(shown(noon * 1_000), "2026-11-11T12:00:00Z");
        for bad in [
            "2026-11-11T12:00:00",
            "1794398400000",
            "now",
            "2026-11-11",
            "2026-11-11T12:00:00+8",
            "ü",
            "",
        ] {
            let refused = parse_bound(bad).unwrap_err().to_string();
            assert!(refused.contains("offset"), "{bad}: {refused}");
        }
        assert_eq!(parse_bound("none").unwrap(), Bound(None));
    }
}
