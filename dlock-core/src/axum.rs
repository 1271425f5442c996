//! Converts errors to responses of axum.

use axum_core::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header::RETRY_AFTER};

use crate::error::{Error, ErrorKind, Operation};

/// Converts an error to a response with a status by its kind:
///
/// | what happened | status |
/// |---|---|
/// | `TimedOut`: somebody else holds the lock | 409 |
/// | `Unavailable`, `Unknown`, `Overloaded`, `ShuttingDown` | 503 with `Retry-After: 1` |
/// | no key could be made from the values, which are too long for example | 400 |
/// | `Lost`, and errors in the program or its configuration | 500 |
///
/// The body shows neither the key nor the holder.
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let key_is_invalid = self.operation() == Operation::Acquire && self.key().is_none();
        let (status, body) = match self.kind() {
            ErrorKind::TimedOut => (StatusCode::CONFLICT, "busy, try again later"),
            ErrorKind::Unavailable
            | ErrorKind::Unknown
            | ErrorKind::Overloaded
            | ErrorKind::ShuttingDown => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable, try again later")
            }
            ErrorKind::Invalid if key_is_invalid => (StatusCode::BAD_REQUEST, "invalid value"),
            ErrorKind::Lost => {
                (StatusCode::INTERNAL_SERVER_ERROR, "interrupted, the outcome is unknown")
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal error"),
        };
        let mut response = (status, body).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
