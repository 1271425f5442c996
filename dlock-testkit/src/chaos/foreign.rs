//! Foreign code in a worker, the hook and the log subscriber, which panics on demand.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dlock::Event;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Metadata, Subscriber};

use crate::process::now;

const MESSAGE: &str = "foreign code panics on purpose";

/// Foreign code panics until this moment.
static PANICS_UNTIL: AtomicU64 = AtomicU64::new(0);

/// Installs the subscriber of this process, and keeps its panics out of the output.
pub(super) fn install() {
    let _ = tracing::subscriber::set_global_default(PanickingSubscriber);
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if info.payload().downcast_ref::<&str>() != Some(&MESSAGE) {
            print(info);
        }
    }));
}

/// Makes foreign code panic from now on for this time.
pub(super) fn panic_for(length: Duration) {
    let length = u64::try_from(length.as_nanos()).unwrap_or(0);
    PANICS_UNTIL.store(now() + length, Ordering::Relaxed);
}

fn is_panicking() -> bool {
    let until = PANICS_UNTIL.load(Ordering::Relaxed);
    until > 0 && now() < until
}

/// The hook of the client.
pub(super) fn hook(_: &Event<'_>) {
    if is_panicking() {
        std::panic::panic_any(MESSAGE);
    }
}

struct PanickingSubscriber;

impl Subscriber for PanickingSubscriber {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && metadata.target().starts_with("dlock") && is_panicking()
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        std::panic::panic_any(MESSAGE);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}
