//! Converts the answers and errors of an inventory to responses of axum. This file is the
//! only place that knows which outcome is which status.

use std::time::Duration;

use axum_core::response::{IntoResponse, Response};
use dlock::extension::refusal;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use serde::Serialize;

use crate::error::Error;
use crate::inventory::{Confirmation, Deduction, Refund, Reservation};

/// Converts an error to a response:
///
/// | what happened | status |
/// |---|---|
/// | `Invalid`: a quantity or an id is out of bounds | 400 |
/// | `NotFound` | 404 |
/// | `Conflict` | 409 |
/// | `NotHeld`: the reservation expired, or was cancelled | 410 |
/// | `Lost`: the store came back without the inventory | 503 |
/// | `OutOfReach`: some homes of the inventory do not answer | 503 with `Retry-After: 1` |
/// | `Throttled` | 429 with `Retry-After` |
/// | `Unknown`: send the same request again | 503 with `Retry-After: 1` |
/// | `Store` | as the error of a lock: 503, or 500 for what a retry does not fix |
///
/// The body is JSON with a `code` that stays the same in later versions, and a `message` for
/// people: `{"code":"sold_out","message":"sold out"}`. It shows neither names nor ids. What it hides is logged under the target
/// `dlock::http`. `Lost`, `OutOfReach` and `Unknown` are debug events there: the inventory logs
/// them under `dlock::inventory`, when they begin and once a minute, not for each request.
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let error = &self;
        match self {
            Error::Invalid(_) => {
                tracing::debug!(target: "dlock::http", %error, status = 400, "refused");
                refusal(StatusCode::BAD_REQUEST, "invalid", "invalid value")
            }
            Error::NotFound(_) => {
                tracing::warn!(target: "dlock::http", %error, status = 404, "not found");
                refusal(StatusCode::NOT_FOUND, "not_found", "not found")
            }
            Error::Conflict(_) => {
                tracing::debug!(target: "dlock::http", %error, status = 409, "refused");
                refusal(StatusCode::CONFLICT, "conflict", "conflict with an earlier request")
            }
            Error::NotHeld(_) => {
                tracing::warn!(target: "dlock::http", %error, status = 410, "not held");
                refusal(StatusCode::GONE, "not_held", "the reservation is over")
            }
            Error::Lost(_) => {
                tracing::debug!(target: "dlock::http", %error, status = 503, "lost");
                refusal(StatusCode::SERVICE_UNAVAILABLE, "lost", "unavailable")
            }
            Error::Throttled { retry_after } => {
                later(StatusCode::TOO_MANY_REQUESTS, "throttled", "too many requests", retry_after)
            }
            Error::Unknown(_) => {
                tracing::debug!(target: "dlock::http", %error, status = 503, "unknown");
                let body = "the outcome is unknown, send the same request again";
                later(StatusCode::SERVICE_UNAVAILABLE, "unknown", body, Duration::ZERO)
            }
            Error::OutOfReach { .. } => {
                tracing::debug!(target: "dlock::http", %error, status = 503, "out of reach");
                later(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "out_of_reach",
                    "unavailable",
                    Duration::ZERO,
                )
            }
            Error::Store(error) => error.into_response(),
        }
    }
}

/// Writes the response to a request for units. Every answer is named, so that a new one does
/// not compile before it has its status.
macro_rules! respond {
    ($outcome:ident { $($done:tt)* }) => {
        /// Converts the answer to a response:
        ///
        /// | what happened | status |
        /// |---|---|
        /// | the units are sold (`Taken`, `Confirmed`) | 200 with the receipt as JSON |
        /// | the units are reserved (`Held`) | 201 with the reservation as JSON |
        /// | `SoldOut`, `Ended` | 410 |
        /// | `Expired`, `Cancelled`: the reservation is over | 410 |
        /// | `NotEnough`: fewer are left than were asked for | 409 |
        /// | `Refunded`: sold before, and given back since | 409 |
        /// | `Refused`: this id is refused for good | 409 |
        /// | `TooOld`: placed too long ago | 409 |
        /// | `NotStarted` | 409 with `Retry-After` |
        /// | `LimitReached` | 429 |
        /// | `Paused` | 503 with `Retry-After: 1` |
        impl IntoResponse for $outcome {
            fn into_response(self) -> Response {
                match self {
                    $($done)*
                    $outcome::SoldOut { .. } => refusal(StatusCode::GONE, "sold_out", "sold out"),
                    $outcome::Ended => refusal(StatusCode::GONE, "ended", "ended"),
                    $outcome::NotEnough { .. } => {
                        refusal(StatusCode::CONFLICT, "not_enough", "fewer are left than were asked for")
                    }
                    $outcome::Refunded(_) => refusal(StatusCode::CONFLICT, "refunded", "refunded since"),
                    $outcome::Refused => refusal(StatusCode::CONFLICT, "refused", "refused"),
                    $outcome::TooOld => refusal(StatusCode::CONFLICT, "too_old", "placed too long ago"),
                    $outcome::LimitReached => {
                        refusal(StatusCode::TOO_MANY_REQUESTS, "limit_reached", "limit per buyer reached")
                    }
                    $outcome::NotStarted { opens_in } => {
                        later(StatusCode::CONFLICT, "not_started", "not started", opens_in)
                    }
                    $outcome::Paused => {
                        later(StatusCode::SERVICE_UNAVAILABLE, "paused", "paused", Duration::ZERO)
                    }
                }
            }
        }
    };
}

respond!(Deduction {
    Deduction::Taken(receipt) => json(StatusCode::OK, &receipt),
});
respond!(Reservation {
    Reservation::Held(hold) => json(StatusCode::CREATED, &hold),
    Reservation::Confirmed(receipt) => json(StatusCode::OK, &receipt),
    Reservation::Expired(_) => refusal(StatusCode::GONE, "expired", "the reservation expired"),
    Reservation::Cancelled(_) => refusal(StatusCode::GONE, "cancelled", "the reservation was cancelled"),
});

/// Converts the answer to a response: 200 with the receipt as JSON if all units are sold, 409
/// if some were refunded since.
impl IntoResponse for Confirmation {
    fn into_response(self) -> Response {
        match self {
            Confirmation::Confirmed(receipt) => json(StatusCode::OK, &receipt),
            Confirmation::Refunded(_) => {
                refusal(StatusCode::CONFLICT, "refunded", "refunded since")
            }
        }
    }
}

/// Converts the answer to a response: 200 with the receipt of the refund as JSON, 409 if
/// fewer units are left than were to be refunded or the id is refused.
impl IntoResponse for Refund {
    fn into_response(self) -> Response {
        match self {
            Refund::Refunded(receipt) => json(StatusCode::OK, &receipt),
            Refund::TooMuch { .. } => {
                refusal(StatusCode::CONFLICT, "too_much", "fewer are left to refund")
            }
            Refund::Refused => refusal(StatusCode::CONFLICT, "refused", "refused"),
        }
    }
}

/// A response that says when to try again: in whole seconds, at least one.
fn later(
    status: StatusCode,
    code: &'static str,
    message: &'static str,
    after: Duration,
) -> Response {
    let mut response = refusal(status, code, message);
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
            refusal(StatusCode::INTERNAL_SERVER_ERROR, "internal", "internal error")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::{Hold, HoldState, Receipt};

    fn status(response: impl IntoResponse) -> (u16, Option<String>) {
        let response = response.into_response();
        let after = response.headers().get(RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()).map(ToOwned::to_owned);
        (response.status().as_u16(), after)
    }

    fn receipt() -> Receipt {
        serde_json::from_value(serde_json::json!({
            "operation": "o", "inventory": 1, "effect": "taken",
            "quantity": 2, "left": 2, "parts": [[0, 2]], "epoch": 0, "at": 1,
        }))
        .expect("a receipt")
    }

    fn hold() -> Hold {
        serde_json::from_value(serde_json::json!({
            "receipt": receipt(), "expires_at": 2, "state": "open",
        }))
        .expect("a reservation")
    }

    #[tokio::test]
    async fn a_refusal_has_a_code() {
        use futures_util::TryStreamExt as _;

        for (response, code) in [
            (Deduction::LimitReached.into_response(), "limit_reached"),
            (Error::Conflict("order-7".into()).into_response(), "conflict"),
        ] {
            assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
            let body: Vec<_> = response.into_body().into_data_stream().try_collect().await.unwrap();
            let body: serde_json::Value = serde_json::from_slice(&body.concat()).unwrap();
            assert_eq!(body["code"], code);
            assert!(body["message"].is_string() && !body.to_string().contains("order-7"), "{body}");
        }
    }

    #[test]
    fn every_deduction_has_its_status() {
        let (reserved, next_expiry) = (0, None);
        assert_eq!(status(Deduction::Taken(receipt())), (200, None));
        assert_eq!(status(Deduction::Refunded(receipt())), (409, None));
        assert_eq!(status(Deduction::SoldOut { reserved, next_expiry }), (410, None));
        let short = Deduction::NotEnough { available: 1, reserved, next_expiry };
        assert_eq!(status(short), (409, None), "it is not sold out");
        assert_eq!(status(Deduction::LimitReached), (429, None));
        assert_eq!(status(Deduction::Refused), (409, None));
        assert_eq!(status(Deduction::TooOld), (409, None));
        assert_eq!(status(Deduction::Ended), (410, None));
        assert_eq!(status(Deduction::Paused), (503, Some("1".into())));
    }

    #[test]
    fn every_reservation_has_its_status() {
        assert_eq!(status(Reservation::Held(hold())), (201, None));
        assert_eq!(status(Reservation::Confirmed(receipt())), (200, None));
        assert_eq!(status(Reservation::Refunded(receipt())), (409, None));
        assert_eq!(status(Reservation::Expired(hold())), (410, None));
        assert_eq!(status(Reservation::Cancelled(hold())), (410, None));
        let opens_in = Duration::from_millis(1_500);
        assert_eq!(status(Reservation::NotStarted { opens_in }), (409, Some("2".into())));
        assert_eq!(status(Reservation::Ended), (410, None));
        assert_eq!(status(Confirmation::Confirmed(receipt())), (200, None));
        assert_eq!(status(Confirmation::Refunded(receipt())), (409, None));
        assert_eq!(status(Refund::Refunded(receipt())), (200, None));
        assert_eq!(status(Refund::TooMuch { left: 1 }), (409, None));
        assert_eq!(status(Refund::Refused), (409, None));
    }

    #[test]
    fn every_error_has_its_status() {
        assert_eq!(status(Error::Conflict("x".into())), (409, None));
        assert_eq!(status(Error::NotFound("x".into())), (404, None));
        assert_eq!(status(Error::Invalid("x".into())), (400, None));
        assert_eq!(status(Error::NotHeld(HoldState::Expired)), (410, None));
        assert_eq!(status(Error::Lost("x".into())), (503, None));
        assert_eq!(status(Error::Unknown(None)), (503, Some("1".into())));
        let retry_after = Duration::from_millis(20);
        assert_eq!(status(Error::Throttled { retry_after }), (429, Some("1".into())));
        let denied = dlock::Error::new(dlock::ErrorKind::Denied, dlock::Operation::Inventory);
        assert_eq!(status(Error::Store(denied)), (500, None));
        let away = dlock::Error::new(dlock::ErrorKind::Unavailable, dlock::Operation::Inventory);
        assert_eq!(status(Error::Store(away)), (503, Some("1".into())));
    }
}
