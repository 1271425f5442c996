//! What a server's or a connection's fault means for the caller, and what to do.
//!
//! Texts from the server are told only where they cannot hold anything of ours.

use redis::{RedisError, ServerError, Value};

use crate::error::{Error, ErrorKind, Operation};

/// Not reached, so nothing was applied.
pub(super) fn unreachable(error: &RedisError, address: &str) -> Error {
    if error.detail().is_some_and(|detail| detail.contains(NO_DATABASE)) {
        return Error::new(ErrorKind::Config, Operation::Connect).with_message(format!(
            "Redis at {address} has no database of this number; use a lower one in the path of the URL or in `database`, or raise `databases` in its configuration"
        ));
    }
    if let Some(code) = error.code().filter(|_| !error.is_io_error()) {
        return refusal(Operation::Connect, code, error.detail().unwrap_or_default());
    }
    if error.kind() == redis::ErrorKind::AuthenticationFailed {
        return denied(Operation::Connect);
    }
    let what = if error.is_timeout() {
        "no answer in time".to_owned()
    } else if error.is_io_error() {
        error.to_string() // of the operating system or of TLS
    } else {
        error.category().to_owned()
    };
    Error::new(ErrorKind::Unavailable, Operation::Connect).with_message(format!(
        "cannot reach Redis at {address}: {what}; check that it runs there and that nothing is in between"
    ))
}

/// Nothing came back while connecting.
pub(super) fn silent(address: &str) -> Error {
    let timed_out = std::io::Error::from(std::io::ErrorKind::TimedOut);
    unreachable(&RedisError::from(timed_out), address)
}

/// The connection broke with the request on it.
pub(super) fn unanswered(operation: Operation, error: &RedisError) -> Error {
    Error::new(ErrorKind::Unknown, operation)
        .with_message(format!("the connection broke before the answer came: {}", error.category()))
}

/// The same of a connection without TLS.
pub(super) fn broken(operation: Operation) -> Error {
    unanswered(operation, &RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe)))
}

/// The server's refusal of a request.
pub(super) fn refused(operation: Operation, error: &ServerError) -> Error {
    refusal(operation, error.code(), error.details().unwrap_or_default())
}

/// Whether an answer, or one of the answers in it, comes from a server that is not the
/// primary any more. It keeps its connections, so they must be left.
pub(super) fn is_not_primary(answer: &Value) -> bool {
    match answer {
        Value::ServerError(error) => {
            let details = error.details().unwrap_or_default();
            NOT_PRIMARY.iter().any(|code| error.code() == *code || is_in(details, code))
        }
        Value::Array(answers) => answers.iter().any(is_not_primary),
        _ => false,
    }
}

const NOT_PRIMARY: [&str; 2] = ["READONLY", "MASTERDOWN"];

/// Whether a call was refused because its keys are in several slots. Nothing was done then.
pub(super) fn is_of_several_slots(answer: &Value) -> bool {
    let Value::ServerError(error) = answer else { return false };
    let details = error.details().unwrap_or_default();
    // The second one is what proxies of some services say.
    error.code() == "CROSSSLOT" || is_in(details, "CROSSSLOT") || details.contains("same slot")
}

/// The same, at a server that is from now on sent one key at a time.
pub(super) fn several_slots(operation: Operation) -> Error {
    Error::new(ErrorKind::Unavailable, operation).with_message(
        "the keys of a call must share a slot at this server; from now on each call is on one key",
    )
}

/// Whether a code is in the text of an error: before version 7 a script's error hides
/// it there.
fn is_in(details: &str, code: &str) -> bool {
    details.split(' ').any(|word| word.trim_matches(['-', '.']) == code)
}

/// The server answers, but is a replica.
pub(super) fn replica() -> Error {
    refusal(Operation::Connect, "READONLY", "")
}

/// An answer that the scripts never give.
pub(super) fn unreadable(operation: Operation) -> Error {
    Error::new(ErrorKind::Unknown, operation).with_message(
        "the answer of the server could not be understood; is it Redis 6.2 or newer, or Valkey?",
    )
}

fn denied(operation: Operation) -> Error {
    Error::new(ErrorKind::Denied, operation).with_message(
        "Redis refused this user or password; correct them in the URL or in `password_file`",
    )
}

/// What is known about a fault by its code, and what to do about it.
const FAULTS: &[(&str, ErrorKind, &str)] = &[
    ("NOAUTH", ErrorKind::Denied, "Redis wants a password; put it in the URL or `password_file`"),
    (
        "WRONGPASS",
        ErrorKind::Denied,
        "Redis refused this user or password; correct them in the URL or in `password_file`",
    ),
    (
        "NOPERM",
        ErrorKind::Denied,
        "the Redis user lacks rights; grant it what docs/redis.acl lists, and for stock docs/redis-inventory.acl",
    ),
    ("OOM", ErrorKind::Unavailable, "Redis is out of memory; raise `maxmemory` or remove data"),
    (
        "MISCONF",
        ErrorKind::Unavailable,
        "Redis cannot write to its disk and takes no writes; make room there or see its log",
    ),
    (
        "READONLY",
        ErrorKind::Unavailable,
        "this Redis is a read-only replica; connect to the primary",
    ),
    (
        "LOADING",
        ErrorKind::Unavailable,
        "Redis is still loading its data; it will answer when done",
    ),
    (
        "BUSY",
        ErrorKind::Unavailable,
        "Redis is busy with somebody's script; end it with SCRIPT KILL",
    ),
    ("MASTERDOWN", ErrorKind::Unavailable, "this Redis replica has lost its primary"),
    (
        "NOREPLICAS",
        ErrorKind::Unavailable,
        "Redis has too few replicas to take writes (`min-replicas-to-write`)",
    ),
    ("CLUSTERDOWN", ErrorKind::Unavailable, "the Redis cluster is down"),
    ("TRYAGAIN", ErrorKind::Unavailable, "the Redis cluster is moving this key"),
    (
        "WRONGTYPE",
        ErrorKind::Config,
        "something else is stored under the name of this lock; use another namespace or database",
    ),
    (
        "DLOCKLAYOUT",
        ErrorKind::Config,
        "another version of this library keeps this lock in a layout unknown here; use the same version everywhere, or another namespace",
    ),
    (
        "MOVED",
        ErrorKind::Config,
        "this is a node of a Redis Cluster; write redis+cluster://host:port",
    ),
    (
        "CROSSSLOT",
        ErrorKind::Config,
        "the keys of a call must share a slot here: this is a proxy in front of several servers, or a node of a Redis Cluster; write redis:// for a proxy (it cannot be a node of redlock://), and redis+cluster:// for a cluster",
    ),
];

/// What Redis says of a database that it does not have, with the code `ERR`.
const NO_DATABASE: &str = "DB index is out of range";
/// What Redis 7.0 says of a command inside a script, with the code `ERR`.
const NO_RIGHT_IN_SCRIPT: &str = "The user executing the script can't run";

fn refusal(operation: Operation, code: &str, details: &str) -> Error {
    let code = if details.starts_with(NO_RIGHT_IN_SCRIPT) { "NOPERM" } else { code };
    let known = FAULTS
        .iter()
        .find(|(known, ..)| code == *known)
        .or_else(|| FAULTS.iter().find(|(known, ..)| is_in(details, known)));
    if let Some((_, kind, words)) = known {
        return Error::new(*kind, operation).with_message(*words);
    }
    // Who has not said a password may not even send a request of some length.
    if code == "ERR" && (details.contains("AUTH") || details.contains("unauthenticated")) {
        return denied(operation);
    }
    let lower = details.to_ascii_lowercase();
    if let Some((_, words)) = OTHER_SERVERS.iter().find(|(text, _)| lower.contains(text)) {
        return Error::new(ErrorKind::Config, operation).with_message(*words);
    }
    // A password or a key could be quoted in an unknown text, so only its code is told.
    tracing::debug!(target: "dlock::redis", code, text = blanked(details), "an unknown refusal");
    Error::new(ErrorKind::Unavailable, operation)
        .with_message(format!(
            "Redis refused with `{code}`; its log, or that of this program at the level debug, says more"
        ))
}

/// What servers say that are not Redis itself, in lower case, and what to do then.
const OTHER_SERVERS: &[(&str, &str)] = &[
    (
        "bad lua script for redis cluster",
        "the proxy of this service refuses the scripts; set its option `script_check_enable` to 0 (docs/redis.md has a table of services)",
    ),
    (
        "undeclared key",
        "this server lets a script use only the keys that it is called with; allow undeclared keys there (Dragonfly: `--default_lua_flags=allow-undeclared-keys`), or use Redis or Valkey",
    ),
    (
        "unknown command 'eval",
        "this server or proxy runs no scripts (`EVAL`), which locks are made of; use Redis or Valkey, or a proxy that passes them on",
    ),
    (
        "unknown command 'cluster",
        "this server or proxy has no command CLUSTER; write redis://host:port for a single address",
    ),
    (
        "not allowed from script",
        "this server does not let scripts use a command that they need (`INFO`, for a node of redlock://); use Redis or Valkey for it",
    ),
];

/// The words of a refusal without what could be a key or a password: what is quoted, and
/// what is no plain word.
fn blanked(details: &str) -> String {
    let is_plain = |word: &str| {
        let word = word.trim_matches(|sign: char| ".,;:()".contains(sign));
        word.len() <= 20 && word.chars().all(|letter| letter.is_ascii_alphabetic())
    };
    let mut quote = None;
    let mut words = Vec::new();
    for word in details.split_whitespace() {
        let first = word.chars().next().filter(|it| "'`\"".contains(*it));
        let was_quoted = quote.is_some();
        quote = quote.or(first);
        let ends = quote.is_some_and(|quote| {
            let at = word.trim_end_matches(|sign: char| ".,;:()".contains(sign));
            at.ends_with(quote) && (was_quoted || at.len() > 1)
        });
        words.push(if quote.is_none() && is_plain(word) { word } else { "_" });
        if ends {
            quote = None;
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_decide_and_texts_stay_inside() {
        let kind = |code, details| refusal(Operation::Acquire, code, details).kind();
        assert_eq!(kind("OOM", ""), ErrorKind::Unavailable);
        assert_eq!(kind("NOPERM", ""), ErrorKind::Denied);
        assert_eq!(
            kind("ERR", "The user executing the script can't run this command or subcommand"),
            ErrorKind::Denied
        );
        let long = "Protocol error: unauthenticated multibulk length";
        assert_eq!(kind("ERR", long), ErrorKind::Denied);
        assert_eq!(
            kind("ERR", "Error running script (call to f_x): @user_script:5: WRONGTYPE Operation"),
            ErrorKind::Config
        );
        assert_eq!(kind("ERR", "user_script:12: DLOCKLAYOUT script: x"), ErrorKind::Config);
        let old = "@user_script: 24: -OOM command not allowed when used memory > 'maxmemory'.";
        let error = refusal(Operation::Acquire, "ERR", old);
        assert!(error.to_string().contains("raise `maxmemory`"), "{error}");
        let error = refusal(Operation::Acquire, "ERR", "hunter2 is no command");
        assert!(!format!("{error} {error:?}").contains("hunter2"));
        assert_eq!(blanked("hunter2 is no command"), "_ is no command");
        let quoted = "unknown command 'AUTH', with args beginning with: 'correct horse' 'b' here";
        assert_eq!(blanked(quoted), "unknown command _ with args beginning with: _ _ _ here");
        assert_eq!(blanked("no `one word left"), "no _ _ _");
        assert_eq!(blanked("the key {shop:a} is not here."), "the key _ is not here.");
    }

    #[test]
    fn servers_that_are_not_redis_are_told_what_to_do() {
        for (text, advice) in [
            ("bad lua script for redis cluster, all the keys that", "`script_check_enable`"),
            ("script tried accessing undeclared key", "allow-undeclared-keys"),
            ("unknown command 'EVALSHA', with args beginning with: 'x'", "runs no scripts"),
            ("unknown command 'CLUSTER', with args beginning with: 'INFO'", "redis://host:port"),
            ("This Redis command is not allowed from script", "`INFO`"),
        ] {
            let error = refusal(Operation::Acquire, "ERR", text);
            assert_eq!(error.kind(), ErrorKind::Config, "{text}");
            assert!(error.to_string().contains(advice), "{error}");
        }
    }
}
