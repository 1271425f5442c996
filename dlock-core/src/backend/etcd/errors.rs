//! What went wrong, in dlock's words.

use etcd_client::Error as EtcdError;

use crate::error::{Error, ErrorKind, Operation};
use crate::key::Key;

/// How a call to etcd failed.
#[derive(Debug)]
pub(super) enum CallError {
    /// Nothing was sent.
    NotSent(Error),
    /// A server answered that it does not do it.
    Refused(EtcdError),
    /// No answer came: it may or may not have been done.
    Lost(Option<EtcdError>),
    /// The member had no leader, or another one than before: nothing was done.
    NoLeader(EtcdError),
    /// The lease of the session is gone, and all its entries with it.
    SessionOver,
    /// The call was made for an earlier version of the session, and did nothing.
    Outdated,
}

/// The status codes of gRPC that are an answer of etcd, and not of the way to it.
const ANSWERS: [i32; 9] = [
    3,  // InvalidArgument
    5,  // NotFound
    6,  // AlreadyExists
    7,  // PermissionDenied
    8,  // ResourceExhausted
    9,  // FailedPrecondition
    11, // OutOfRange
    12, // Unimplemented
    16, // Unauthenticated
];

fn code(error: &EtcdError) -> Option<i32> {
    match error {
        EtcdError::GRpcStatus(status) => Some(i32::from(status.code())),
        _ => None,
    }
}

/// Whether etcd refused the user, or that there is none. It says so as of any bad argument.
fn is_refused_user(error: &EtcdError) -> bool {
    let EtcdError::GRpcStatus(status) = error else { return false };
    ["authentication failed", "user name is empty"].iter().any(|it| status.message().contains(it))
}

/// Whether etcd does not know the login of a connection any more, or refused the password by
/// which the driver crate made another one.
pub(super) fn is_login_over(error: &EtcdError) -> bool {
    code(error) == Some(16) || is_refused_user(error)
}

/// Whether a member refused a call for want of a leader. It does so before a write is
/// proposed; a leader that changes fails reads only.
fn is_without_leader(error: &EtcdError) -> bool {
    let EtcdError::GRpcStatus(status) = error else { return false };
    ["etcdserver: no leader", "etcdserver: leader changed"].contains(&status.message())
}

/// One failed transaction fails many calls.
impl Clone for CallError {
    fn clone(&self) -> Self {
        match self {
            CallError::NotSent(error) => CallError::NotSent(error.clone()),
            CallError::Refused(EtcdError::GRpcStatus(status)) => {
                CallError::Refused(EtcdError::GRpcStatus(status.clone()))
            }
            CallError::NoLeader(EtcdError::GRpcStatus(status)) => {
                CallError::NoLeader(EtcdError::GRpcStatus(status.clone()))
            }
            CallError::SessionOver => CallError::SessionOver,
            CallError::Outdated => CallError::Outdated,
            // The other errors of the driver crate cannot be cloned.
            CallError::Refused(_) | CallError::NoLeader(_) | CallError::Lost(_) => {
                CallError::Lost(None)
            }
        }
    }
}

impl CallError {
    pub(super) fn of(error: EtcdError) -> Self {
        match &error {
            error_of if is_without_leader(error_of) => CallError::NoLeader(error),
            EtcdError::GRpcStatus(status) if status.message().contains("lease not found") => {
                CallError::SessionOver
            }
            EtcdError::LeaseKeepAliveError(what) if what.contains("lease not found") => {
                CallError::SessionOver
            }
            error_of if code(error_of).is_some_and(|code| ANSWERS.contains(&code)) => {
                CallError::Refused(error)
            }
            _ => CallError::Lost(Some(error)),
        }
    }

    /// Whether the server refused the number of operations in a transaction.
    pub(super) fn is_too_many(&self) -> bool {
        matches!(self, CallError::Refused(EtcdError::GRpcStatus(status)) if status.message().contains("too many operations"))
    }

    /// Whether it is worth to try again.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            CallError::Lost(_)
            | CallError::NotSent(_)
            | CallError::NoLeader(_)
            | CallError::Outdated => true,
            CallError::Refused(error) => code(error) == Some(8),
            CallError::SessionOver => false,
        }
    }

    /// The error of a call that may have changed something.
    pub(super) fn written(self, operation: Operation, key: &Key) -> Error {
        match self {
            CallError::Lost(source) => {
                let error = Error::new(ErrorKind::Unknown, operation)
                    .with_key(key)
                    .with_message("etcd did not answer; the change may or may not have been made");
                match source {
                    Some(source) => error.with_source(source),
                    None => error,
                }
            }
            error => error.read(operation).with_key(key),
        }
    }

    /// The error of a call that failed when an earlier one may have changed something.
    pub(super) fn in_doubt(self, operation: Operation, key: &Key) -> Error {
        match self {
            CallError::Lost(_) => self.written(operation, key),
            error => Error::new(ErrorKind::Unknown, operation)
                .with_key(key)
                .with_message("etcd failed; an earlier change may or may not have been made")
                .with_source(error.read(operation)),
        }
    }

    /// The error of a call that changed nothing.
    pub(super) fn read(self, operation: Operation) -> Error {
        let error = |kind| Error::new(kind, operation);
        match self {
            CallError::NotSent(error) => error.with_operation(operation),
            CallError::SessionOver | CallError::Outdated => error(ErrorKind::Unavailable)
                .with_message("the session with etcd ended; a new one is made with the next call"),
            CallError::Lost(source) => {
                let error = error(ErrorKind::Unavailable).with_message("etcd did not answer");
                match source {
                    Some(source) => error.with_source(source),
                    None => error,
                }
            }
            CallError::NoLeader(source) => error(ErrorKind::Unavailable)
                .with_message("the members of etcd have no leader at the moment")
                .with_source(source),
            CallError::Refused(source) => {
                let (kind, what) = match code(&source) {
                    Some(7) => (
                        ErrorKind::Denied,
                        "etcd refused: the user of the URL lacks the right to read and write the keys below the path of the URL",
                    ),
                    Some(16) => (ErrorKind::Denied, "etcd refused the user of the URL"),
                    _ if is_refused_user(&source) => (
                        ErrorKind::Denied,
                        "etcd refused the user and password of the URL, or needs them",
                    ),
                    Some(3) => (ErrorKind::Config, "etcd does not accept the request"),
                    Some(9) => (
                        ErrorKind::Denied,
                        "etcd refused: it does not know users, or needs one; add or remove user and password in the URL",
                    ),
                    Some(8) => (
                        ErrorKind::Unavailable,
                        "etcd has no room or too many requests; if its space is used up, compact and defragment it, and disarm the alarm",
                    ),
                    _ => (ErrorKind::Unavailable, "etcd failed; see the source of this error"),
                };
                error(kind).with_message(what).with_source(source)
            }
        }
    }
}
