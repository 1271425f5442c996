//! What a failed request means for the caller, and what to do.
//!
//! Texts of the agent are told only where they cannot hold anything of ours but names that
//! the caller knows.

use std::fmt;

use hyper::StatusCode;

use super::http::Response;
use crate::error::{Error, ErrorKind, Operation};

/// A request without an answer.
#[derive(Debug)]
pub(super) struct Failure {
    /// Whether the agent may have got it.
    may_have_arrived: bool,
    why: String,
}

impl Failure {
    pub(super) fn not_sent(why: impl fmt::Display) -> Self {
        Failure { may_have_arrived: false, why: why.to_string() }
    }

    pub(super) fn unknown(why: impl fmt::Display) -> Self {
        Failure { may_have_arrived: true, why: why.to_string() }
    }

    /// The connection broke before the whole answer was there.
    pub(super) fn cut_off(error: hyper::Error) -> Self {
        Failure::unknown(format_args!("the connection broke before the answer ({error})"))
    }

    /// The error of a call that failed so.
    pub(super) fn error(self, operation: Operation, address: &str) -> Error {
        let Failure { may_have_arrived, why } = self;
        match may_have_arrived {
            true => Error::new(ErrorKind::Unknown, operation).with_message(format!(
                "Consul at {address} did not answer: {why}; the change may or may not have been made"
            )),
            false => Error::new(ErrorKind::Unavailable, operation).with_message(format!(
                "cannot reach Consul at {address}: {why}; check that an agent runs there and that nothing is in between"
            )),
        }
    }
}

/// The error of an answer that is not the expected one.
pub(super) fn refused(response: &Response, operation: Operation, address: &str) -> Error {
    let text = response.text();
    let status = response.status;
    if status == StatusCode::FORBIDDEN || text.contains("Permission denied") {
        return denied(operation, address);
    }
    if text.contains("No path to datacenter") {
        return Error::new(ErrorKind::Config, operation).with_message(format!(
            "Consul at {address} does not know the datacenter; check `consul.datacenter`"
        ));
    }
    let kind = if text.contains("No cluster leader") || status == StatusCode::TOO_MANY_REQUESTS {
        ErrorKind::Unavailable
    } else if status.is_server_error() {
        ErrorKind::Unknown // an agent may have passed the change on
    } else if status == StatusCode::BAD_REQUEST {
        ErrorKind::Config
    } else {
        ErrorKind::Unavailable
    };
    Error::new(kind, operation)
        .with_message(format!("Consul at {address} answered {status}: {text}"))
}

/// The token is not valid or lacks a right.
pub(super) fn denied(operation: Operation, address: &str) -> Error {
    Error::new(ErrorKind::Denied, operation).with_message(format!(
        "Consul at {address} refused the token, or it lacks a right; docs/consul.md lists the rights"
    ))
}

/// The answer cannot be read.
pub(super) fn unreadable(operation: Operation, address: &str, error: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Unknown, operation).with_message(format!(
        "the answer of Consul at {address} cannot be read ({error}); check that it is Consul"
    ))
}
