//! What an error of a database means for the caller, and what to do.
//!
//! Texts from the server are told only where they cannot hold anything of ours.

use sqlx::error::DatabaseError;

use crate::error::{Error, ErrorKind, Operation};

/// What an error of the driver means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The transaction was in the way of another one: a deadlock, a serialization
    /// failure, a row that was made in the meantime, a busy file.
    Conflict,
    /// A row stayed locked for too long.
    Locked,
    /// The same, and the server still waits for it on this connection.
    StillWaiting,
    /// The connection is gone.
    Disconnected,
    /// The server refuses connections or changes for now: too many connections, a full disk.
    Refused(&'static str),
    /// The server takes no changes: it is a replica, or was made one while this connection was
    /// open. Another connection may reach the primary.
    ReadOnly,
    /// The user or the password is wrong.
    Credentials,
    /// The rights of the user do not suffice.
    Denied,
    /// What the URL names cannot have the locks: there is no such database, or its tables are
    /// others.
    Unfit(&'static str),
    /// The tables are missing.
    NoTables,
    /// The server has another fault; it will not go away by itself.
    Other,
}

/// Why a database cannot be used that is not there.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) const NO_DATABASE: Cause =
    Cause::Unfit("there is no database with this name; make it, or correct the name in the URL");
/// Why a database cannot be used that has other tables.
pub(super) const OTHER_TABLES: Cause = Cause::Unfit(
    "another version of dlock, or another program, made its tables `dlock_...`; use the same version everywhere, or another database",
);

/// Why an account of MySQL cannot log in over a connection in plain text.
#[cfg(feature = "mysql")]
pub(super) const NEEDS_TLS: Cause = Cause::Unfit(
    "MySQL checks the password of this user over TLS only (caching_sha2_password); turn TLS on at the server (MySQL 8.0.12 and older offer none that is safe), and remove sslmode=disable from the URL; docs/sql.md says what else works",
);

/// Why a database is refused that only speaks the language of another one.
#[cfg(any(feature = "mysql", feature = "postgres"))]
const OTHER_DATABASES: [(&str, Cause); 3] = [
    (
        "CockroachDB",
        Cause::Unfit(
            "it is CockroachDB, where each node has the time of its own clock and no message reaches a waiting client: a lock could end early and be held twice; use PostgreSQL, or another backend",
        ),
    ),
    (
        "-YB-",
        Cause::Unfit(
            "it is YugabyteDB, where each node has the time of its own clock and READ COMMITTED may be another isolation: a lock could end early and be held twice; use PostgreSQL, or another backend",
        ),
    ),
    (
        "TiDB",
        Cause::Unfit(
            "it is TiDB, where each node has the time of its own clock and rows are not locked as in MySQL: a lock could end early and be held twice; use MariaDB or MySQL, or another backend",
        ),
    ),
];

/// Checks what a database says of its version.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(super) fn check_version(version: &str) -> sqlx::Result<()> {
    match OTHER_DATABASES.iter().find(|(name, _)| version.contains(name)) {
        Some((_, cause)) => Err(Found::error(*cause, version)),
        None => Ok(()),
    }
}

/// A failed transaction.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(super) cause: Cause,
    pub(super) error: Error,
}

impl Fault {
    /// A fault of the driver before the transaction was committed, so nothing was applied.
    pub(super) fn before_commit(cause: Cause, source: sqlx::Error, address: &str) -> Self {
        let (kind, what) = match cause {
            Cause::Conflict => (
                ErrorKind::Unavailable,
                "other transactions conflicted with every attempt; nothing was changed; try again"
                    .to_owned(),
            ),
            Cause::Locked | Cause::StillWaiting => (
                ErrorKind::Unavailable,
                "another transaction has locked the row for too long; nothing was changed"
                    .to_owned(),
            ),
            Cause::Disconnected => (
                ErrorKind::Unavailable,
                format!(
                    "cannot reach the database at {address}: {}; check that it runs there and that nothing is in between",
                    broken(&source)
                ),
            ),
            Cause::Refused(why) => {
                (ErrorKind::Unavailable, format!("the database at {address} refuses: {why}"))
            }
            Cause::ReadOnly => (
                ErrorKind::Unavailable,
                format!(
                    "the database at {address} refuses: it is a replica, or read-only; give the address of the primary"
                ),
            ),
            Cause::Credentials => (
                ErrorKind::Denied,
                format!(
                    "the database at {address} refused the user or the password; check them in the URL or in the password file"
                ),
            ),
            Cause::Denied => (
                ErrorKind::Denied,
                format!(
                    "the user lacks a right in the database at {address}; docs/sql.md lists the rights"
                ),
            ),
            Cause::Unfit(why) => {
                (ErrorKind::Config, format!("the database at {address} cannot be used: {why}"))
            }
            Cause::NoTables => (
                ErrorKind::Config,
                format!(
                    "the database at {address} does not have the tables of dlock; make them with `dlock schema --url ...` or with .migrate(true)"
                ),
            ),
            Cause::Other => (
                ErrorKind::Unavailable,
                format!("the database at {address} failed; see the source of this error"),
            ),
        };
        let error = Error::new(kind, Operation::Connect).with_message(what).with_source(source);
        Fault { cause, error }
    }

    /// The connection broke after the commit was sent.
    pub(super) fn in_commit(source: sqlx::Error) -> Self {
        let error = Error::new(ErrorKind::Unknown, Operation::Connect)
            .with_message("the connection broke before the database confirmed the commit; the change may or may not have been made")
            .with_source(source);
        Fault { cause: Cause::Disconnected, error }
    }

    /// A row that this version cannot read.
    pub(super) fn unknown_layout() -> Self {
        let error = Error::new(ErrorKind::Config, Operation::Connect).with_message(
            "a row of dlock_lock has another layout; do all processes use compatible versions of dlock?",
        );
        Fault { cause: Cause::Other, error }
    }

    pub(super) fn of(error: Error) -> Self {
        Fault { cause: Cause::Other, error }
    }

    /// Whether the same transaction may succeed at once.
    pub(super) fn is_passing(&self) -> bool {
        self.error.kind() == ErrorKind::Unavailable
            && (self.cause == Cause::Conflict || self.leaves_server())
    }

    /// Whether the connections of now are of no use, and others may be.
    pub(super) fn leaves_server(&self) -> bool {
        matches!(self.cause, Cause::Disconnected | Cause::ReadOnly)
    }
}

/// Why there is no connection, without anything that was sent or received.
fn broken(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Io(error) => error.to_string(), // of the operating system
        sqlx::Error::Tls(error) => format!(
            "TLS failed ({error}; sslmode=disable in the URL is a connection in plain text)"
        ),
        sqlx::Error::Protocol(what) => format!("the answer could not be understood ({what})"),
        sqlx::Error::Database(_) => "the server ended the connection".to_owned(),
        _ => "the connection broke".to_owned(),
    }
}

/// What a client found out by itself, where neither the server nor the driver says it.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) cause: Cause,
    pub(super) what: String,
}

impl Found {
    pub(super) fn error(cause: Cause, what: impl Into<String>) -> sqlx::Error {
        sqlx::Error::AnyDriverError(Box::new(Found { cause, what: what.into() }))
    }
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Found {}

/// The server's own error, or what another one means.
pub(super) fn of_the_driver(error: &sqlx::Error) -> Result<&dyn DatabaseError, Cause> {
    match error {
        sqlx::Error::Database(error) => Ok(&**error),
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::WorkerCrashed => Err(Cause::Disconnected),
        sqlx::Error::AnyDriverError(error) => {
            Err(error.downcast_ref::<Found>().map_or(Cause::Other, |found| found.cause))
        }
        _ => Err(Cause::Other),
    }
}
