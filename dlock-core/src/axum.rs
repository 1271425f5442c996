//! Converts errors to responses of axum.

use std::time::Instant;

use axum_core::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use parking_lot::Mutex;

use crate::error::{BodyStatus, Error, ErrorKind, Operation};
use crate::observe::outage::{Line, Outage};

/// Converts an error to a response with a status by its kind:
///
/// | what happened | status |
/// |---|---|
/// | `TimedOut`: somebody else holds the lock | 409 |
/// | `Unavailable`, `Unknown`, `Overloaded`, `ShuttingDown`; `Lost` before the body had begun | 503 with `Retry-After: 1` |
/// | no key could be made from the values, which are too long for example | 400 |
/// | `Lost` while the body ran, and errors in the program or its configuration | 500 |
///
/// The body is JSON with a `code` that stays the same in later versions (`busy`, `unavailable`,
/// `invalid`, `interrupted`, `internal`) and a `message` for people. It shows neither the key nor
/// the holder. What it hides is logged under the target
/// `dlock::http`, with the key's label: a 503 at WARN, a 500 at ERROR (no client, no
/// rights, a lock that was lost). Of many errors of a kind the first is logged, and then one a
/// minute with their number; each is there at DEBUG.
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let key_is_invalid = self.operation() == Operation::Acquire && self.key().is_none();
        let unavailable =
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable", "unavailable, try again later");
        let (status, code, message) = match self.kind() {
            ErrorKind::TimedOut => (StatusCode::CONFLICT, "busy", "busy, try again later"),
            ErrorKind::Lost if self.body_status() == BodyStatus::NotRun => unavailable,
            ErrorKind::Unavailable
            | ErrorKind::Unknown
            | ErrorKind::Overloaded
            | ErrorKind::ShuttingDown => unavailable,
            ErrorKind::Invalid if key_is_invalid => {
                (StatusCode::BAD_REQUEST, "invalid", "invalid value")
            }
            ErrorKind::Lost => (
                StatusCode::INTERNAL_SERVER_ERROR,
                "interrupted",
                "interrupted, the outcome is unknown",
            ),
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal", "internal error"),
        };
        log(&self, status, &mut OUTAGES.lock());
        let mut response = refusal(status, code, message);
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A response whose body has a stable code for programs, and a message for people.
pub fn refusal(status: StatusCode, code: &'static str, message: &'static str) -> Response {
    let body = format!(r#"{{"code":"{code}","message":"{message}"}}"#);
    (status, [(CONTENT_TYPE, "application/json")], body).into_response()
}

/// The kinds of errors that handlers of this process answer with just now.
static OUTAGES: Mutex<Outages> = Mutex::new(Outages(Vec::new()));

struct Outages(Vec<(ErrorKind, Outage)>);

impl Outages {
    /// Whether an error of this kind is worth a line, and how many there were so far.
    fn line(&mut self, kind: ErrorKind, now: Instant) -> Option<u64> {
        let place = self.0.iter().position(|(known, _)| *known == kind).unwrap_or_else(|| {
            self.0.push((kind, Outage::default()));
            self.0.len() - 1
        });
        match self.0[place].1.failed(now)? {
            Line::GoesOn { counts, .. } => Some(counts.failed),
            _ => Some(1),
        }
    }
}

/// Logs the cause of a response that says nothing about it. A busy lock and a bad value
/// are the answer themselves; they are only debug events of the lock.
fn log(error: &Error, status: StatusCode, outages: &mut Outages) {
    if !status.is_server_error() {
        return;
    }
    let key = error.key().map(crate::Key::label);
    let status_code = status.as_u16();
    match (outages.line(error.kind(), Instant::now()), status) {
        (Some(so_far), StatusCode::SERVICE_UNAVAILABLE) => {
            tracing::warn!(target: "dlock::http", key, %error, status = status_code, so_far, "unavailable");
        }
        (Some(so_far), _) => {
            tracing::error!(target: "dlock::http", key, %error, status = status_code, so_far, "failed");
        }
        (None, _) => {
            tracing::debug!(target: "dlock::http", key, %error, status = status_code, "failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Key;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// The status of the response, and what was logged.
    fn answer(error: Error) -> (u16, String) {
        let written = Written::default();
        let writer = written.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let response = tracing::subscriber::with_default(subscriber, || error.into_response());
        let text = String::from_utf8(written.0.lock().clone()).unwrap();
        (response.status().as_u16(), text)
    }

    #[test]
    fn what_the_response_hides_is_logged_with_the_key() {
        let key = Key::new("order:7").unwrap();
        for (kind, operation, status, level) in [
            (ErrorKind::Denied, Operation::Acquire, 500, "ERROR"),
            (ErrorKind::NoClient, Operation::Configure, 500, "ERROR"),
            (ErrorKind::Lost, Operation::Hold, 500, "ERROR"),
            (ErrorKind::Unavailable, Operation::Acquire, 503, "WARN"),
            (ErrorKind::Overloaded, Operation::Acquire, 503, "WARN"),
        ] {
            let error = Error::new(kind, operation).with_key(&key).with_message("the true cause");
            let error = error.with_body_status(BodyStatus::Cancelled);
            let (answered, logged) = answer(error);
            assert_eq!(answered, status, "{kind:?}");
            for words in [level, "dlock::http", "key=\"order:7\"", "the true cause"] {
                assert!(logged.contains(words), "{kind:?}: {words} is not in {logged}");
            }
        }
        let busy = Error::new(ErrorKind::TimedOut, Operation::Acquire).with_key(&key);
        assert_eq!(answer(busy), (409, String::new()));
        let lost = |body| Error::new(ErrorKind::Lost, Operation::Hold).with_body_status(body);
        assert_eq!(answer(lost(BodyStatus::NotRun)).0, 503, "nothing was done, so try again");
        assert_eq!(answer(lost(BodyStatus::Cancelled)).0, 500);
    }

    /// Each request of a crowd fails while the store is away.
    #[test]
    fn an_outage_is_a_few_lines() {
        let (mut outages, start) = (Outages(Vec::new()), Instant::now());
        let failed = |second: u64| start + std::time::Duration::from_secs(second);
        let lines: Vec<_> = (0..150)
            .flat_map(|second| [second; 1_000])
            .filter_map(|second| outages.line(ErrorKind::Unavailable, failed(second)))
            .collect();
        assert_eq!(lines, [1, 60_001, 120_001]);
        assert_eq!(outages.line(ErrorKind::Denied, failed(150)), Some(1), "another cause");
    }
}
