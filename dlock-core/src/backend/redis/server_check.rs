//! What a server must be before locks are kept in it: new enough, and a primary.
//!
//! The first connection is refused to a server that could throw locks out of its
//! memory, unless the user said that a warning will do; later ones only warn,
//! since locks are held by then. A user without the right to ask is warned.

use redis::{Value, cmd};

use super::connector::Connection;
use super::errors;
use crate::config::Eviction;
use crate::error::{Error, ErrorKind, Operation, Result};

/// The oldest Redis that will do.
const OLDEST: (u32, u32) = (6, 2);

/// What a server must be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ServerKind {
    /// A primary by itself.
    Primary,
    /// A node of a cluster. A replica will do: it says who its primary is.
    Node,
}

pub(super) async fn check(
    connection: &Connection,
    kind: ServerKind,
    eviction: Eviction,
    first: bool,
) -> Result<()> {
    let Some(info) = info(connection).await? else { return Ok(()) };
    if let Some(version) = field(&info, "redis_version")
        && is_too_old(version)
    {
        return Err(fault(format!("this is Redis {version}; locks need 6.2 or newer, or Valkey")));
    }
    // Valkey may call it by its own name.
    let mode = field(&info, "redis_mode").or_else(|| field(&info, "server_mode"));
    let wrong = match (mode, kind) {
        (Some("sentinel"), _) => {
            "this is a Sentinel; write redis+sentinel://host:port/NAME with the name of the primary"
        }
        (Some("cluster"), ServerKind::Primary) => {
            "this is a node of a Redis Cluster; write redis+cluster://host:port"
        }
        (Some("standalone"), ServerKind::Node) => {
            "this is not a node of a Redis Cluster; write redis:// for one server"
        }
        _ => "",
    };
    if !wrong.is_empty() {
        return Err(fault(wrong.into()));
    }
    if kind == ServerKind::Primary && field(&info, "role") == Some("slave") {
        return Err(errors::replica());
    }
    let policy = field(&info, "maxmemory_policy").unwrap_or("noeviction");
    if policy == "noeviction" {
        return Ok(());
    }
    let what = format!(
        "with `maxmemory-policy {policy}` this Redis may throw locks away when it runs out of memory; set it to `noeviction`, or accept it with the option eviction=warn"
    );
    if first && eviction == Eviction::Refuse {
        return Err(fault(what));
    }
    tracing::warn!(target: "dlock::redis", "{what}");
    Ok(())
}

/// Whether the keys of one call must share a slot: a proxy in front of several servers calls
/// itself one server, and refuses a script whose keys are at two of them.
pub(super) async fn wants_one_slot(connection: &Connection) -> Result<bool> {
    let mut probe = cmd("EVAL");
    probe.arg("return 1").arg(2).arg("dlock:2:{a}:slot").arg("dlock:2:{b}:slot");
    let answer = connection.send(&probe).await;
    let answer = answer.map_err(|error| errors::unanswered(Operation::Connect, &error))?;
    Ok(errors::is_of_several_slots(&answer))
}

async fn info(connection: &Connection) -> Result<Option<String>> {
    let answer = connection.send(&cmd("INFO")).await;
    match answer.map_err(|error| errors::unanswered(Operation::Connect, &error))? {
        Value::BulkString(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Value::VerbatimString { text, .. } => Ok(Some(text)),
        Value::ServerError(error) if error.code() == "NOPERM" => {
            tracing::warn!(
                target: "dlock::redis",
                "the Redis user may not call INFO, so nobody knows whether locks can be evicted"
            );
            Ok(None)
        }
        Value::ServerError(error) => Err(errors::refused(Operation::Connect, &error)),
        _ => Ok(None),
    }
}

fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn is_too_old(version: &str) -> bool {
    let mut numbers = version.split('.').map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) => (major, minor) < OLDEST,
        _ => false,
    }
}

fn fault(what: String) -> Error {
    Error::new(ErrorKind::Config, Operation::Connect).with_message(what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (version, old) in [
            ("6.0.16", true),
            ("6.2.0", false),
            ("7.0.15", false),
            ("10.1.2", false),
            ("5.9", true),
            ("unknown", false),
        ] {
            assert_eq!(is_too_old(version), old, "{version}");
        }
        assert_eq!(field("# Server\r\nredis_version:7.0.15\r\n", "redis_version"), Some("7.0.15"));
    }
}
