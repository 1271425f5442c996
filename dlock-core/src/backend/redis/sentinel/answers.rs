//! Pure: what the Sentinels answered, and which of them is believed.
//!
//! A failover raises the epoch of the configuration, so the answer with the highest epoch
//! is the newest one. A Sentinel that is cut off together with the old primary answers
//! with a lower one, and the old primary still calls itself a primary. So:
//!
//! - only Sentinels that know each other are compared: an address may lead to a Sentinel of
//!   another group, which knows a primary of the same name and may have a higher epoch. The
//!   group counts that was believed before, and of others the one with most Sentinels. If
//!   most Sentinels tell of another group than before, they were set up anew;
//! - among the answers of a group the highest epoch wins, whoever answered first; among
//!   equal ones the address that most of them name;
//! - an epoch below one that was believed before is believed only if most of the
//!   Sentinels tell it: then it is no isolated one, but somebody has set them up anew.

use std::fmt;

use redis::Value;

use super::super::node_ids::{NodeIds, are_of_one_group};
use crate::error::{Error, ErrorKind, Operation, Result};

/// Where the primary is, and since which failover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::backend::redis) struct Primary {
    pub(in crate::backend::redis) host: String,
    pub(in crate::backend::redis) port: u16,
    pub(in crate::backend::redis) epoch: u64,
}

impl fmt::Display for Primary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// A primary, and the Sentinels that decide about it: the one that named it, and those that
/// it knows. Empty if it may not tell them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) primary: Primary,
    pub(super) sentinels: NodeIds,
}

impl Named {
    /// Whether the other was named by a Sentinel of the same group.
    pub(super) fn is_of_group_of(&self, other: &Named) -> bool {
        let (some, others) = (&self.sentinels, &other.sentinels);
        some.is_empty() || others.is_empty() || are_of_one_group(some, others)
    }
}

/// What one Sentinel answered.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Primary(Named),
    /// It knows others, but not this one.
    Unknown {
        known: Vec<String>,
    },
    /// It is something else.
    NotASentinel,
    Failed(Error),
}

impl Answer {
    pub(super) fn named(&self) -> Option<&Named> {
        match self {
            Answer::Primary(named) => Some(named),
            _ => None,
        }
    }
}

/// Which primary is believed. `seen` was believed before, and `sentinels` were asked.
pub(super) fn decide(
    name: &str,
    seen: Option<&Named>,
    sentinels: usize,
    answers: &[(String, Answer)],
) -> Result<Named> {
    let unavailable = |what: String| {
        Err(Error::new(ErrorKind::Unavailable, Operation::Connect).with_message(what))
    };
    let named: Vec<&Named> = answers.iter().filter_map(|(_, answer)| answer.named()).collect();
    if named.is_empty() {
        return Err(nobody(name, sentinels, answers));
    }
    let groups = named.iter().map(|one| {
        let group: Vec<&Named> =
            named.iter().copied().filter(|other| one.is_of_group_of(other)).collect();
        let newest = group.iter().map(|it| it.primary.epoch).max();
        (seen.is_none_or(|seen| one.is_of_group_of(seen)), group.len(), newest, group)
    });
    let believed = groups
        .filter(|(is_known, size, ..)| *is_known || size * 2 > sentinels)
        .max_by_key(|(is_known, size, newest, _)| (*is_known, *size, *newest));
    let Some((is_known, .., group)) = believed else {
        return unavailable(format!(
            "the reachable Sentinels know a primary `{name}`, but they are not those that this client knows: was an address given to a Sentinel of other servers? Check the addresses in the URL; if the Sentinels were set up anew, restart this program"
        ));
    };
    if !is_known {
        tracing::warn!(target: "dlock::redis", name, "the Sentinels were set up anew");
    }
    let supporters =
        |one: &Named| group.iter().filter(|other| other.primary == one.primary).count();
    // Of several that are equal the last one would win, so that it is reversed.
    let newest = group.iter().rev().max_by_key(|it| (it.primary.epoch, supporters(it)));
    let Some(best) = newest else { return Err(nobody(name, sentinels, answers)) };
    let is_older = seen.is_some_and(|seen| best.primary.epoch < seen.primary.epoch);
    if is_older && supporters(best) <= sentinels / 2 {
        return unavailable(format!(
            "the reachable Sentinels name an outdated primary for `{name}` (older than the last failover); check that this machine can reach the other Sentinels"
        ));
    }
    for (shown, answer) in answers {
        let what = match answer {
            Answer::Primary(_) => continue,
            Answer::Unknown { .. } => format!("it knows no primary called `{name}`"),
            Answer::NotASentinel => "it is not a Sentinel".to_owned(),
            Answer::Failed(error) => error.to_string(),
        };
        tracing::debug!(target: "dlock::redis", sentinel = shown, what, "no answer of a Sentinel");
    }
    Ok((*best).clone())
}

/// Why nobody named a primary: first what the user must change.
fn nobody(name: &str, sentinels: usize, answers: &[(String, Answer)]) -> Error {
    let find = |wanted: fn(&Answer) -> bool| answers.iter().find(|(_, answer)| wanted(answer));
    let config =
        |what: String| Error::new(ErrorKind::Config, Operation::Connect).with_message(what);
    if let Some((shown, Answer::Unknown { known })) =
        find(|answer| matches!(answer, Answer::Unknown { .. }))
    {
        let known = match known.as_slice() {
            [] => "none at all".to_owned(),
            known => format!("`{}`", known.join("`, `")),
        };
        return config(format!(
            "the Sentinel at {shown} knows no primary called `{name}`; it knows {known}: correct the name after the hosts in the URL"
        ));
    }
    if let Some((shown, _)) = find(|answer| matches!(answer, Answer::NotASentinel)) {
        return config(format!(
            "the server at {shown} is not a Sentinel; write the addresses of the Sentinels, whose usual port is 26379, or redis:// for one server"
        ));
    }
    if let Some((shown, _)) =
        find(|answer| matches!(answer, Answer::Failed(error) if error.kind() == ErrorKind::Denied))
    {
        return Error::new(ErrorKind::Denied, Operation::Connect).with_message(format!(
            "the Sentinel at {shown} refuses this user or password; set `sentinel.user` and `sentinel.password_file`, which are not those of the servers"
        ));
    }
    let why = answers.iter().find_map(|(shown, answer)| match answer {
        Answer::Failed(error) => Some(format!("{shown}: {error}")),
        _ => None,
    });
    Error::new(ErrorKind::Unavailable, Operation::Connect).with_message(format!(
        "none of the {sentinels} Sentinels answers ({})",
        why.unwrap_or_else(|| "no answer in time".to_owned())
    ))
}

/// The answer in those to `SENTINEL MASTER` and `SENTINEL GET-MASTER-ADDR-BY-NAME`, and the
/// Sentinels in those to `SENTINEL MYID` and `SENTINEL SENTINELS`.
pub(super) fn read(state: &Value, address: &Value, own_id: &Value, others: &Value) -> Answer {
    if let Value::ServerError(error) = state {
        let details = error.details().unwrap_or_default().to_ascii_lowercase();
        return match error.code() {
            "ERR" if details.contains("no such master") => Answer::Unknown { known: Vec::new() },
            "ERR" if details.contains("unknown command") => Answer::NotASentinel,
            _ => Answer::Failed(super::errors::refused(Operation::Connect, error)),
        };
    }
    let epoch = field(state, "config-epoch").and_then(|epoch| epoch.parse().ok());
    let (Some(epoch), Value::Array(parts)) = (epoch, address) else {
        return Answer::Failed(super::errors::unreadable(Operation::Connect));
    };
    match parts.as_slice() {
        [host, port] => match (text(host), text(port).and_then(|port| port.parse().ok())) {
            (Some(host), Some(port)) => {
                let primary = Primary { host, port, epoch };
                Answer::Primary(Named { primary, sentinels: ids(own_id, others) })
            }
            _ => Answer::Failed(super::errors::unreadable(Operation::Connect)),
        },
        _ => Answer::Unknown { known: Vec::new() },
    }
}

/// The ids of all Sentinels; none if one of both is refused.
fn ids(own_id: &Value, others: &Value) -> NodeIds {
    match (text(own_id), others) {
        (Some(own_id), Value::Array(others)) => {
            let others = others.iter().filter_map(|state| field(state, "runid"));
            // The id of one that was never reached is not known.
            others.chain([own_id]).filter(|id| !id.is_empty()).collect()
        }
        _ => NodeIds::new(),
    }
}

/// The names in the answer to `SENTINEL MASTERS`.
pub(super) fn names(answer: &Value) -> Vec<String> {
    match answer {
        Value::Array(all) => all.iter().filter_map(|state| field(state, "name")).collect(),
        _ => Vec::new(),
    }
}

/// The new address in a message of `+switch-master`, if it is about this primary: the
/// name, the old host and port, and the new ones.
pub(super) fn switched_to(message: &str, name: &str) -> Option<(String, u16)> {
    let mut words = message.split(' ');
    if words.next()? != name {
        return None;
    }
    let (host, port) = (words.nth(2)?, words.next()?);
    Some((host.to_owned(), port.parse().ok()?))
}

/// A field of an answer that is a map, or a list of names and values.
fn field(state: &Value, name: &str) -> Option<String> {
    match state {
        Value::Map(pairs) => {
            let found = pairs.iter().find(|(key, _)| text(key).as_deref() == Some(name))?;
            text(&found.1)
        }
        Value::Array(words) => {
            let mut pairs = words.chunks_exact(2);
            text(&pairs.find(|pair| text(&pair[0]).as_deref() == Some(name))?[1])
        }
        _ => None,
    }
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        Value::SimpleString(text) => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(port: u16, epoch: u64, sentinels: &[&str]) -> Named {
        let sentinels = sentinels.iter().map(|id| (*id).to_owned()).collect();
        Named { primary: Primary { host: "h".into(), port, epoch }, sentinels }
    }

    fn primary(port: u16, epoch: u64) -> Answer {
        Answer::Primary(named(port, epoch, &["a", "b", "c"]))
    }

    fn foreign(port: u16, epoch: u64) -> Answer {
        Answer::Primary(named(port, epoch, &["x", "y", "z"]))
    }

    fn failed(kind: ErrorKind) -> Answer {
        Answer::Failed(Error::new(kind, Operation::Connect))
    }

    fn decided(seen: u64, answers: &[Answer]) -> Result<u16> {
        let answers: Vec<_> =
            answers.iter().enumerate().map(|(n, it)| (format!("s{n}"), it.clone())).collect();
        let seen = (seen > 0).then(|| named(1, seen, &["a", "b", "c"]));
        decide("mymaster", seen.as_ref(), 3, &answers).map(|named| named.primary.port)
    }

    #[test]
    fn the_highest_epoch_wins() {
        assert_eq!(decided(0, &[primary(1, 4), primary(2, 5), primary(1, 4)]).unwrap(), 2);
        assert_eq!(decided(0, &[primary(2, 5), primary(1, 4)]).unwrap(), 2);
        assert_eq!(decided(0, &[primary(1, 0)]).unwrap(), 1);
        // One that is promoted but not announced yet has the same epoch at most.
        assert_eq!(decided(0, &[primary(1, 5), primary(2, 5), primary(2, 5)]).unwrap(), 2);
        assert_eq!(decided(0, &[failed(ErrorKind::Unavailable), primary(3, 1)]).unwrap(), 3);
    }

    #[test]
    fn a_lone_voice_from_the_past_is_not_believed() {
        let error = decided(5, &[primary(1, 4)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("older than the last failover"), "{error}");
        assert_eq!(decided(5, &[primary(1, 5)]).unwrap(), 1);
        // Set up anew: most of them say so.
        assert_eq!(decided(5, &[primary(1, 0), primary(1, 0)]).unwrap(), 1);
        assert!(decided(5, &[primary(1, 3), primary(2, 4)]).is_err(), "they do not agree");
    }

    #[test]
    fn another_group_is_not_believed_whatever_its_epoch() {
        for seen in [0, 5] {
            let answers = [foreign(9, 57), primary(1, 5), primary(1, 5)];
            assert_eq!(decided(seen, &answers).unwrap(), 1);
        }
        let error = decided(5, &[foreign(9, 57)]).unwrap_err();
        assert!(error.to_string().contains("other servers"), "{error}");
        assert_eq!(decided(5, &[foreign(9, 57), primary(1, 5), foreign(9, 57)]).unwrap(), 1);
        // Set up anew: most of them say so.
        assert_eq!(decided(5, &[foreign(9, 1), foreign(9, 1)]).unwrap(), 9);
        // A Sentinel that came and one that went leave a group what it is.
        let grown = Answer::Primary(named(2, 6, &["b", "c", "d"]));
        assert_eq!(decided(5, &[grown]).unwrap(), 2);
        // Who may not tell the others is taken for one of them.
        let silent = Answer::Primary(named(3, 6, &[]));
        assert_eq!(decided(5, &[silent, primary(1, 5)]).unwrap(), 3);
    }

    #[test]
    fn errors_say_what_to_change() {
        let says = |answers: &[Answer], kind, words: &str| {
            let error = decided(0, answers).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(words), "{error}");
        };
        let unknown = Answer::Unknown { known: vec!["shop".into()] };
        let down = failed(ErrorKind::Unavailable);
        says(&[down.clone(), unknown], ErrorKind::Config, "it knows `shop`");
        says(&[down.clone(), Answer::NotASentinel], ErrorKind::Config, "s1 is not a Sentinel");
        says(&[failed(ErrorKind::Denied)], ErrorKind::Denied, "sentinel.password_file");
        says(&[down], ErrorKind::Unavailable, "none of the 3 Sentinels");
        says(&[], ErrorKind::Unavailable, "no answer in time");
    }

    #[test]
    fn answers_are_read() {
        let word = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let words = |texts: &[&str]| Value::Array(texts.iter().map(|text| word(text)).collect());
        let state = words(&["name", "mymaster", "config-epoch", "7"]);
        let others = Value::Array(vec![words(&["runid", "b"]), words(&["runid", ""])]);
        let address = words(&["10.0.0.1", "6380"]);
        let Answer::Primary(named) = read(&state, &address, &word("a"), &others) else {
            panic!("no primary")
        };
        assert_eq!(named.primary, Primary { host: "10.0.0.1".into(), port: 6380, epoch: 7 });
        assert!(named.sentinels.iter().eq(["a", "b"]), "{named:?}");
        let read = |state: &Value, address: &Value| read(state, address, &Value::Nil, &Value::Nil);
        assert!(matches!(read(&state, &Value::Nil), Answer::Failed(_)));
        assert!(matches!(read(&state, &words(&[])), Answer::Unknown { .. }));
        assert_eq!(names(&Value::Array(vec![state])), ["mymaster"]);
        let map = Value::Map(vec![(word("config-epoch"), word("3"))]);
        let answer = read(&map, &words(&["h", "1"]));
        assert!(matches!(answer, Answer::Primary(it) if it.primary.epoch == 3));
    }

    #[test]
    fn switches_are_read() {
        let message = "mymaster 10.0.0.1 6379 10.0.0.2 6380";
        assert_eq!(switched_to(message, "mymaster"), Some(("10.0.0.2".into(), 6380)));
        assert_eq!(switched_to(message, "other"), None);
        assert_eq!(switched_to("mymaster 1", "mymaster"), None);
    }
}
