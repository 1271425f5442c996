//! Observability: `tracing` events, metrics, and a hook for [`Event`]s.
//!
//! | target | event | level | fields |
//! |---|---|---|---|
//! | `dlock::lock` | span `acquire` | debug | `key` |
//! | `dlock::lock` | `acquired` | debug | `key`, `token`, `waited_us`, `handed_over` |
//! | `dlock::lock` | `refused` | debug | `key`, `error` |
//! | `dlock::lock` | `released` | debug | `key`, `held_us` |
//! | `dlock::lease` | `renewed` | trace | `key` |
//! | `dlock::lease` | `uncertain` | warn | `key`, `error` |
//! | `dlock::lease` | `lost` | error | `key`, `reason` |
//!
//! With the feature `metrics` there are the counters `dlock_acquired_total`,
//! `dlock_waited_total`, `dlock_handed_over_total`, `dlock_refused_total`
//! (with `kind`), `dlock_renewed_total`, `dlock_uncertain_total`,
//! `dlock_lost_total`, and the histograms `dlock_wait_seconds` and
//! `dlock_hold_seconds`.
//!
//! `key` is the key's template or the name given in code, not its values; for a key
//! that was made from a string it is that string: see
//! [`Key::label`](crate::Key::label). The label `lock` of the metrics is the template
//! or the name, else `unnamed`.

pub(crate) mod dispatch;
#[cfg(feature = "metrics")]
mod metrics;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::claim::LossReason;
use crate::error::Error;
use crate::key::Key;

/// Something that happened to a lock of a client, as
/// [`DlockBuilder::on_event`](crate::DlockBuilder::on_event) gets it.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A task acquired a lock.
    Acquired {
        /// The key that was acquired.
        key: &'a Key,
        /// The fencing token; `None` for permits, which have none.
        token: Option<u64>,
        /// How long the task waited.
        waited: Duration,
        /// Whether another task of this process handed the lock over.
        handed_over: bool,
    },
    /// A task could not acquire a lock.
    Refused {
        /// The key that was requested.
        key: &'a Key,
        /// The reason why it was not acquired.
        error: &'a Error,
    },
    /// A task released a lock.
    Released {
        /// The key that was released.
        key: &'a Key,
        /// How long the task held the lock.
        held: Duration,
    },
    /// A lease was renewed.
    Renewed {
        /// The key of the lease.
        key: &'a Key,
    },
    /// A lease could not be renewed; it is still held, and the renewal is tried again.
    Uncertain {
        /// The key of the lease.
        key: &'a Key,
        /// The reason why it was not renewed.
        error: &'a Error,
    },
    /// A lock was lost while it was held.
    Lost {
        /// The key that was lost.
        key: &'a Key,
        /// The reason why it was lost.
        reason: &'a LossReason,
    },
}

pub(crate) type Hook = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// Sends events to logs, metrics and the hook.
#[derive(Clone, Default)]
pub(crate) struct Observer {
    hook: Option<Hook>,
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("hook", &self.hook.is_some()).finish()
    }
}

impl Observer {
    pub(crate) fn new(hook: Option<Hook>) -> Self {
        Observer { hook }
    }

    /// Logs, metrics and the hook are other people's code, which runs in the task, in a
    /// drop or on the thread of the events: a panic of theirs must not end any of these.
    pub(crate) fn tell(&self, event: &Event<'_>) {
        guarded(|| trace(event));
        #[cfg(feature = "metrics")]
        guarded(|| metrics::record(event));
        if let Some(hook) = &self.hook {
            guarded(|| hook(event));
        }
    }

    /// Events were dropped because they could not be delivered fast enough.
    fn tell_dropped(&self, count: usize) {
        guarded(|| {
            tracing::warn!(
                target: "dlock::lease",
                count,
                "events were dropped: a subscriber, a recorder or the hook is too slow"
            );
        });
    }

    /// Whether anybody wants to know of each renewal.
    pub(crate) fn wants_renewals(&self) -> bool {
        self.hook.is_some()
            || cfg!(feature = "metrics")
            || tracing::level_filters::LevelFilter::current() >= tracing::Level::TRACE
    }
}

fn guarded(tell: impl FnOnce()) {
    let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(tell));
    if told.is_err() {
        let _ = std::panic::catch_unwind(|| {
            tracing::error!(
                target: "dlock::lock",
                "a tracing subscriber, a metrics recorder or the on_event hook panicked"
            );
        });
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn trace(event: &Event<'_>) {
    match *event {
        Event::Acquired { key, token, waited, handed_over } => tracing::debug!(
            target: "dlock::lock",
            key = key.label(), token, waited_us = micros(waited), handed_over, "acquired"
        ),
        Event::Refused { key, error } => {
            tracing::debug!(target: "dlock::lock", key = key.label(), %error, "refused");
        }
        Event::Released { key, held } => tracing::debug!(
            target: "dlock::lock", key = key.label(), held_us = micros(held), "released"
        ),
        Event::Renewed { key } => {
            tracing::trace!(target: "dlock::lease", key = key.label(), "renewed");
        }
        Event::Uncertain { key, error } => {
            tracing::warn!(target: "dlock::lease", key = key.label(), %error, "uncertain");
        }
        Event::Lost { key, reason } => {
            tracing::error!(target: "dlock::lease", key = key.label(), %reason, "lost");
        }
    }
}
