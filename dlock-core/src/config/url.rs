//! Reading a URL, and telling what was probably meant when it cannot be read. The URL
//! may hold a password, so an error repeats nothing but its scheme.

use url::Url;

use super::backends::SCHEMES;
use super::values::fault;
use crate::error::Result;

/// Schemes that others use for what has another name here.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("unix", "redis+unix"),
    ("redis-unix", "redis+unix"),
    ("redis+socket", "redis+unix"),
    ("redis-socket", "redis+unix"),
    ("redis+tls", "rediss"),
    ("redis+ssl", "rediss"),
    ("tls", "rediss"),
    ("https", "rediss"),
    ("valkeys", "rediss"),
    ("valkey", "redis"),
    ("tcp", "redis"),
    ("http", "redis"),
];
/// The most letters in which a misspelt scheme differs from the one that was meant.
const MAX_DISTANCE: usize = 2;

/// Parses a URL whose scheme is known.
pub(super) fn parse_url(text: &str) -> Result<Url> {
    if text.trim().is_empty() {
        return Err(fault("the URL is empty; write for example redis://localhost:6379".into()));
    }
    if text.starts_with('/') {
        return Err(fault(
            "the URL has no scheme; for a socket write redis+unix:// before the path".into(),
        ));
    }
    let (scheme, rest) = text.split_once(':').unwrap_or(("", text));
    let scheme = scheme.to_ascii_lowercase();
    let known = SCHEMES.contains(&scheme.as_str());
    if !rest.starts_with("//") {
        return Err(fault(match meant(&scheme) {
            Some(meant) => format!("the URL has no `//` after its scheme; write {meant}://"),
            None => format!(
                "the URL has no scheme; write for example redis:// before the host, as in redis://localhost:6379 ({})",
                supported()
            ),
        }));
    }
    if !known {
        let hint = meant(&scheme).map(|meant| format!("; did you mean {meant}://?"));
        return Err(fault(format!(
            "unknown scheme `{scheme}://`{} ({})",
            hint.unwrap_or_default(),
            supported()
        )));
    }
    Url::parse(text).map_err(|error| {
        fault(format!("the URL is not valid ({error}); write for example redis://localhost:6379"))
    })
}

fn supported() -> String {
    format!("this build supports {}://", SCHEMES.join("://, "))
}

/// The scheme that was probably meant, if it is compiled in.
fn meant(scheme: &str) -> Option<&'static str> {
    if let Some((_, meant)) = OTHER_NAMES.iter().find(|(other, _)| *other == scheme) {
        return SCHEMES.contains(meant).then_some(*meant);
    }
    let near = SCHEMES.iter().map(|known| (distance(scheme, known), *known));
    let (distance, nearest) = near.min_by_key(|(distance, _)| *distance)?;
    (distance <= MAX_DISTANCE).then_some(nearest)
}

/// How many letters must be inserted, removed or replaced to make one of the other.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, b) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}
