//! Errors as responses of axum.

use axum_core::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header::RETRY_AFTER};

use crate::error::{Error, ErrorKind, Operation};

/// | what happened | status |
/// |---|---|
/// | `TimedOut`: somebody else holds the lock | 409 |
/// | `Unavailable`, `Unknown`, `Overloaded`, `ShuttingDown` | 503 with `Retry-After: 1` |
/// | no key could be made from the values, too long for instance | 400 |
/// | `Lost`, and what only a change of the program or its configuration mends | 500 |
///
/// The text says no more than that: neither the key nor who holds it.
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let unmade_key = self.operation() == Operation::Acquire && self.key().is_none();
        let (status, text) = match self.kind() {
            ErrorKind::TimedOut => (StatusCode::CONFLICT, "busy, try again later"),
            ErrorKind::Unavailable
            | ErrorKind::Unknown
            | ErrorKind::Overloaded
            | ErrorKind::ShuttingDown => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable, try again later")
            }
            ErrorKind::Invalid if unmade_key => (StatusCode::BAD_REQUEST, "invalid value"),
            ErrorKind::Lost => {
                (StatusCode::INTERNAL_SERVER_ERROR, "interrupted, the outcome is unknown")
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal error"),
        };
        let mut response = (status, text).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
