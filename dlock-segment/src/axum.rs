//! Converts the answers and errors of an inventory to responses of axum. This file is the
//! only place that knows which outcome is which status.

use std::time::Duration;

use axum_core::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use serde::Serialize;

use crate::error::Error;
use crate::inventory::{Deduction, Reservation};

/// Converts an error to a response:
///
/// | what happened | status |
/// |---|---|
/// | `Invalid`: a quantity or an id is out of bounds | 400 |
/// | `NotFound` | 404 |
/// | `Conflict` | 409 |
/// | `NotHeld`: the reservation expired, or was cancelled | 410 |
/// | `Lost`: the store came back without the inventory | 503 |
/// | `Throttled` | 429 with `Retry-After` |
/// | `Unknown`: send the same request again | 503 with `Retry-After: 1` |
/// | `Store` | as the error of a lock: 503, or 500 for what a retry does not fix |
///
/// The body shows neither names nor ids. What it hides is logged under the target
/// `dlock::http`.
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let error = &self;
        match self {
            Error::Invalid(_) => {
                tracing::debug!(target: "dlock::http", %error, status = 400, "refused");
                text(StatusCode::BAD_REQUEST, "invalid value")
            }
            Error::NotFound(_) => {
                tracing::warn!(target: "dlock::http", %error, status = 404, "not found");
                text(StatusCode::NOT_FOUND, "not found")
            }
            Error::Conflict(_) => {
                tracing::debug!(target: "dlock::http", %error, status = 409, "refused");
                text(StatusCode::CONFLICT, "conflict with an earlier request")
            }
            Error::NotHeld(_) => {
                tracing::warn!(target: "dlock::http", %error, status = 410, "not held");
                text(StatusCode::GONE, "the reservation is over")
            }
            Error::Lost(_) => {
                tracing::error!(target: "dlock::http", %error, status = 503, "lost");
                text(StatusCode::SERVICE_UNAVAILABLE, "unavailable")
            }
            Error::Throttled { retry_after } => {
                later(StatusCode::TOO_MANY_REQUESTS, "too many requests", retry_after)
            }
            Error::Unknown(_) => {
                tracing::warn!(target: "dlock::http", %error, status = 503, "unknown");
                let body = "the outcome is unknown, send the same request again";
                later(StatusCode::SERVICE_UNAVAILABLE, body, Duration::ZERO)
            }
            Error::Store(error) => error.into_response(),
            #[allow(unreachable_patterns, reason = "a new error is a 500 until it has its line")]
            _ => {
                tracing::error!(target: "dlock::http", %error, status = 500, "failed");
                text(StatusCode::INTERNAL_SERVER_ERROR, "internal error")
            }
        }
    }
}

/// Writes the response to a request for units. What is not named here is a 409.
macro_rules! respond {
    ($outcome:ident, $done:ident, $status:ident) => {
        /// Converts the answer to a response: the units as JSON, 410 when it is sold out or
        /// over, 429 when the buyer has reached the limit, 503 while it is paused, 409 for
        /// everything else.
        impl IntoResponse for $outcome {
            fn into_response(self) -> Response {
                match self {
                    $outcome::$done(done) => json(StatusCode::$status, &done),
                    $outcome::SoldOut { .. } => text(StatusCode::GONE, "sold out"),
                    $outcome::Ended => text(StatusCode::GONE, "ended"),
                    $outcome::LimitReached => {
                        text(StatusCode::TOO_MANY_REQUESTS, "limit per buyer reached")
                    }
                    $outcome::NotStarted { opens_in } => {
                        later(StatusCode::CONFLICT, "not started", opens_in)
                    }
                    $outcome::Paused => {
                        later(StatusCode::SERVICE_UNAVAILABLE, "paused", Duration::ZERO)
                    }
                    _ => text(StatusCode::CONFLICT, "refused"),
                }
            }
        }
    };
}

respond!(Deduction, Taken, OK);
respond!(Reservation, Held, CREATED);

fn text(status: StatusCode, body: &'static str) -> Response {
    (status, body).into_response()
}

/// A response that says when to try again: in whole seconds, at least one.
fn later(status: StatusCode, body: &'static str, after: Duration) -> Response {
    let mut response = text(status, body);
    let seconds = after.as_millis().div_ceil(1_000).max(1);
    if let Ok(seconds) = HeaderValue::try_from(seconds.to_string()) {
        response.headers_mut().insert(RETRY_AFTER, seconds);
    }
    response
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => (status, [(CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => {
            tracing::error!(target: "dlock::http", %error, "the answer is not JSON");
            text(StatusCode::INTERNAL_SERVER_ERROR, "internal error")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(response: impl IntoResponse) -> (u16, Option<String>) {
        let response = response.into_response();
        let after = response.headers().get(RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()).map(ToOwned::to_owned);
        (response.status().as_u16(), after)
    }

    #[test]
    fn every_outcome_has_its_status() {
        let sold_out = Deduction::SoldOut { reserved: 0, next_expiry: None };
        assert_eq!(status(sold_out), (410, None));
        assert_eq!(status(Deduction::LimitReached), (429, None));
        assert_eq!(status(Deduction::Refused), (409, None));
        assert_eq!(status(Deduction::Paused), (503, Some("1".into())));
        let opens_in = Duration::from_millis(1_500);
        assert_eq!(status(Reservation::NotStarted { opens_in }), (409, Some("2".into())));
        assert_eq!(status(Reservation::Ended), (410, None));
        assert_eq!(status(Error::Conflict("x".into())), (409, None));
        assert_eq!(status(Error::NotFound("x".into())), (404, None));
        assert_eq!(status(Error::Invalid("x".into())), (400, None));
        assert_eq!(status(Error::Unknown(None)), (503, Some("1".into())));
        let retry_after = Duration::from_millis(20);
        assert_eq!(status(Error::Throttled { retry_after }), (429, Some("1".into())));
        let denied = dlock::Error::new(dlock::ErrorKind::Denied, dlock::Operation::Inventory);
        assert_eq!(status(Error::Store(denied)), (500, None));
        let away = dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory);
        assert_eq!(status(Error::Store(away)), (503, Some("1".into())));
    }
}
