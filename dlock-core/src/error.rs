//! The error type: what happened, on which key, and what to do.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use crate::key::Key;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an [`Error`], by which a program decides what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is not valid, such as a key, a ttl or a number of permits. Fix the
    /// call.
    Invalid,
    /// The URL or the configuration is not valid. Fix it and start again.
    Config,
    /// The backend cannot do this; see its [`Capabilities`](crate::Capabilities).
    Unsupported,
    /// Somebody else still held the lock when the wait was over.
    TimedOut,
    /// Too many tasks of this process already wait for this key.
    Overloaded,
    /// The wait could never end, because the caller itself holds what it waits for.
    WouldDeadlock,
    /// The lock was held and is no longer held: its deadline passed, it was broken,
    /// or it was ended by `max_hold` or `shutdown`. A write that was under way may or
    /// may not have happened.
    Lost,
    /// The backend could not be reached, or refused for now. Nothing was changed.
    Unavailable,
    /// The backend did not answer, so the change may or may not have been made.
    Unknown,
    /// The backend refused the credentials, or they lack a right.
    Denied,
    /// The client is shutting down and accepts no new requests.
    ShuttingDown,
    /// There is no global client: see [`init`](crate::init).
    NoClient,
}

impl ErrorKind {
    /// Whether the same call may succeed later without a change of program or
    /// configuration.
    pub fn is_retryable(self) -> bool {
        matches!(
            self,
            ErrorKind::TimedOut
                | ErrorKind::Overloaded
                | ErrorKind::Lost
                | ErrorKind::Unavailable
                | ErrorKind::Unknown
        )
    }

    /// Whether the reason is that others hold the lock or wait for it.
    pub fn is_busy(self) -> bool {
        matches!(self, ErrorKind::TimedOut | ErrorKind::Overloaded)
    }

    fn description(self) -> &'static str {
        match self {
            ErrorKind::Invalid => "invalid argument",
            ErrorKind::Config => "invalid configuration",
            ErrorKind::Unsupported => "not supported by this backend",
            ErrorKind::TimedOut => "timed out waiting",
            ErrorKind::Overloaded => "too many waiters",
            ErrorKind::WouldDeadlock => "would deadlock",
            ErrorKind::Lost => "lock lost",
            ErrorKind::Unavailable => "backend unavailable",
            ErrorKind::Unknown => "outcome unknown",
            ErrorKind::Denied => "permission denied",
            ErrorKind::ShuttingDown => "client is shutting down",
            ErrorKind::NoClient => "no client",
        }
    }
}

/// The operation that failed with an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Reading the configuration or the URL.
    Configure,
    /// Connecting to the backend.
    Connect,
    /// Acquiring a lock.
    Acquire,
    /// Renewing a lease.
    Renew,
    /// Releasing a lock.
    Release,
    /// Running work under a lock.
    Hold,
    /// Inspecting a key.
    Inspect,
    /// Listing keys.
    List,
    /// Breaking the lock of somebody else.
    Break,
    /// Changing the units of an inventory (`dlock-segment`).
    Inventory,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::Configure => "configure",
            Operation::Connect => "connect",
            Operation::Acquire => "acquire",
            Operation::Renew => "renew",
            Operation::Release => "release",
            Operation::Hold => "hold",
            Operation::Inspect => "inspect",
            Operation::List => "list",
            Operation::Break => "break",
            Operation::Inventory => "inventory",
        }
    }
}

/// How far the work under a lock got before the [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BodyStatus {
    /// The work did not start.
    NotRun,
    /// The work was dropped at an await because the lock was lost. A write that it
    /// had sent may or may not have happened.
    Cancelled,
}

/// An error: its kind, the operation that failed, the key, and a message that says
/// what happened and what to do.
///
/// The message shows the key's label (see [`Key::label`]), not the values in it;
/// those are in [`Error::key`].
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    operation: Operation,
    key: Option<Key>,
    key_label: &'static str,
    detail: String,
    body: BodyStatus,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// Makes an error of this kind; the other methods add to it.
    pub fn new(kind: ErrorKind, operation: Operation) -> Self {
        Error(Box::new(Inner {
            kind,
            operation,
            key: None,
            key_label: "",
            detail: String::new(),
            body: BodyStatus::NotRun,
            source: None,
        }))
    }

    /// Makes the error of an option that cannot be used; the message says what to write.
    pub(crate) fn config(detail: impl Into<String>) -> Self {
        Error::new(ErrorKind::Config, Operation::Configure).with_message(detail)
    }

    /// Sets the message: what happened and what to do. It must not contain secrets or
    /// the values of keys.
    #[must_use]
    pub fn with_message(mut self, detail: impl Into<String>) -> Self {
        self.0.detail = detail.into();
        self
    }

    /// Sets the key that the error is about.
    #[must_use]
    pub fn with_key(mut self, key: &Key) -> Self {
        self.0.key = Some(key.clone());
        self
    }

    /// Sets the error that caused this one.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Sets the operation that failed.
    #[cfg(any(
        feature = "consul",
        feature = "etcd",
        feature = "mysql",
        feature = "postgres",
        feature = "redis",
        feature = "sqlite",
        feature = "zookeeper"
    ))]
    #[must_use]
    pub(crate) fn with_operation(mut self, operation: Operation) -> Self {
        self.0.operation = operation;
        self
    }

    /// Sets the label of a key that could not be made.
    pub(crate) fn with_key_label(mut self, template: &'static str) -> Self {
        self.0.key_label = template;
        self
    }

    /// Sets how far the work under the lock got.
    pub(crate) fn with_body_status(mut self, body: BodyStatus) -> Self {
        self.0.body = body;
        self
    }

    /// How far the work under the lock got.
    pub fn body_status(&self) -> BodyStatus {
        self.0.body
    }

    /// The kind of the error, by which a program decides what to do.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The operation that failed.
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// What happened and what to do, without kind, operation and key.
    pub(crate) fn detail(&self) -> &str {
        if self.0.detail.is_empty() { self.0.kind.description() } else { &self.0.detail }
    }

    /// The key that the error is about, if there is one.
    pub fn key(&self) -> Option<&Key> {
        self.0.key.as_ref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { kind, operation, key, key_label, detail, .. } = &*self.0;
        write!(f, "{}: {}", operation.name(), kind.description())?;
        match key {
            Some(key) => write!(f, " (key `{}`)", key.label())?,
            None if !key_label.is_empty() => write!(f, " (key `{key_label}`)")?,
            None => {}
        }
        if !detail.is_empty() {
            write!(f, ": {detail}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({self}")?;
        if let Some(source) = &self.0.source {
            write!(f, "; caused by: {source}")?;
        }
        f.write_str(")")
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}
