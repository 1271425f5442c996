//! What went wrong, in dlock's words.

use zookeeper_client::Error as ZkError;

use crate::error::{Error, ErrorKind, Operation};

/// Whether the server answered a write with this error, so that the quorum was asked.
pub(super) fn is_answer(error: &ZkError) -> bool {
    matches!(
        error,
        ZkError::NoNode
            | ZkError::NodeExists
            | ZkError::NotEmpty
            | ZkError::BadVersion
            | ZkError::NoAuth
            | ZkError::NoChildrenForEphemerals
    )
}

/// Whether a call that failed so may succeed when it is made again by the same session. What
/// is not known may be temporary.
pub(super) fn may_pass(error: &ZkError) -> bool {
    let is_final = matches!(
        error,
        ZkError::SessionExpired
            | ZkError::ClientClosed
            | ZkError::NoAuth
            | ZkError::AuthFailed
            | ZkError::BadArguments(_)
            | ZkError::Unimplemented
    );
    !is_final
}

/// The error of a call that may have changed something.
pub(super) fn written(operation: Operation, error: ZkError) -> Error {
    match error {
        ZkError::ConnectionLoss | ZkError::Timeout | ZkError::Custom(_) => {
            Error::new(ErrorKind::Unknown, operation)
                .with_message("the connection to ZooKeeper broke before it answered; the change may or may not have been made")
                .with_source(error)
        }
        error => read(operation, error),
    }
}

/// The error of a call that changed nothing.
pub(super) fn read(operation: Operation, error: ZkError) -> Error {
    let (kind, what) = match &error {
        ZkError::SessionExpired | ZkError::SessionMoved | ZkError::ClientClosed => (
            ErrorKind::Unavailable,
            "the session with ZooKeeper ended; a new one is made with the next call",
        ),
        ZkError::NoAuth => (
            ErrorKind::Denied,
            "ZooKeeper refused: the user of the URL lacks a right on the node, or on one above it",
        ),
        ZkError::AuthFailed => {
            (ErrorKind::Denied, "ZooKeeper refused the user and password of the URL")
        }
        ZkError::NoChildrenForEphemerals => (
            ErrorKind::Invalid,
            "a node on the way to this key is ephemeral and can have no children; choose another key",
        ),
        ZkError::QuotaExceeded => {
            (ErrorKind::Unavailable, "the quota of the node is used up; raise it (setquota)")
        }
        ZkError::InvalidAcl | ZkError::BadArguments(_) => {
            (ErrorKind::Config, "ZooKeeper does not accept the request")
        }
        _ => (ErrorKind::Unavailable, "ZooKeeper could not be reached"),
    };
    Error::new(kind, operation).with_message(what).with_source(error)
}
