//! Observability: `tracing` events, metrics, and a hook for [`Event`]s.
//!
//! | target | event | level | fields |
//! |---|---|---|---|
//! | `dlock::lock` | span `acquire` | debug | `key` |
//! | `dlock::lock` | `acquired` | debug | `key`, `token`, `waited_us`, `queued`, `handed_over` |
//! | `dlock::lock` | `refused` | debug | `key`, `error` |
//! | `dlock::lock` | `released` | debug | `key`, `held_us` |
//! | `dlock::lease` | `renewed` | trace | `key` |
//! | `dlock::lease` | `uncertain` | debug | `key`, `error` |
//! | `dlock::lease` | `locks cannot be renewed ..`, when an outage begins | warn | `key`, `error` |
//! | `dlock::lease` | `locks still cannot be renewed`, once a minute | warn | `key`, `error`, `since_s`, `failed`, `lost` |
//! | `dlock::lease` | `locks can be renewed again`, when it ends | warn | `lasted_s`, `failed`, `lost` |
//! | `dlock::lease` | `lost` | error | `key`, `reason` |
//! | `dlock::client` | `connected`, or `connects when it is first used` | info | `backend`, `address`, `namespace`, `ttl`, `wait` |
//! | `dlock::http` | the cause of a response of axum: `unavailable` | warn | `key`, `error`, `status` |
//! | `dlock::http` | the same: `failed` | error | `key`, `error`, `status` |
//!
//! The lines about an outage are for the whole client; the hook and the metrics get every
//! event.
//!
//! With the feature `metrics` there are the counters `dlock_acquired_total`,
//! `dlock_waited_total`, `dlock_handed_over_total`, `dlock_refused_total`
//! (with `kind`), `dlock_renewed_total`, `dlock_uncertain_total`,
//! `dlock_lost_total`, the gauges `dlock_held` and `dlock_waiting`, and the histograms
//! `dlock_wait_seconds` and `dlock_hold_seconds`.
//!
//! `key` is the key's template or the name given in code, not its values; for a key
//! that was made from a string it is that string: see
//! [`Key::label`](crate::Key::label). The label `lock` of the metrics is the template
//! or the name, else `unnamed`.

pub(crate) mod dispatch;
#[cfg(feature = "metrics")]
pub(crate) mod metrics;
pub(crate) mod outage;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use self::outage::{Counts, Line, Outage};
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
        /// How long the acquisition took, including the round trip.
        waited: Duration,
        /// Whether the task had to wait because somebody else had the lock.
        queued: bool,
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
    /// Clones share it: one client has one outage.
    outage: Arc<Mutex<Outage>>,
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("hook", &self.hook.is_some()).finish()
    }
}

impl Observer {
    pub(crate) fn new(hook: Option<Hook>) -> Self {
        #[cfg(feature = "metrics")]
        metrics::describe();
        Observer { hook, outage: Arc::default() }
    }

    /// Logs, metrics and the hook are other people's code, which runs in the task, in a
    /// drop or on the thread of the events: a panic of theirs must not end any of these.
    pub(crate) fn emit(&self, event: &Event<'_>) {
        guarded(|| trace(event, &self.outage));
        #[cfg(feature = "metrics")]
        guarded(|| metrics::record(event));
        if let Some(hook) = &self.hook {
            guarded(|| hook(event));
        }
    }

    /// Events were dropped because they could not be delivered fast enough.
    fn emit_dropped(&self, count: usize) {
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
            || self.outage.lock().is_open() // the first renewal ends it
            || tracing::level_filters::LevelFilter::current() >= tracing::Level::TRACE
    }
}

fn guarded(emit: impl FnOnce()) {
    let emitted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(emit));
    if emitted.is_err() {
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

fn trace(event: &Event<'_>, outage: &Mutex<Outage>) {
    match *event {
        Event::Acquired { key, token, waited, queued, handed_over } => tracing::debug!(
            target: "dlock::lock",
            key = key.label(), token, waited_us = micros(waited), queued, handed_over, "acquired"
        ),
        Event::Refused { key, error } => {
            tracing::debug!(target: "dlock::lock", key = key.label(), %error, "refused");
        }
        Event::Released { key, held } => tracing::debug!(
            target: "dlock::lock", key = key.label(), held_us = micros(held), "released"
        ),
        Event::Renewed { key } => {
            tracing::trace!(target: "dlock::lease", key = key.label(), "renewed");
            let line = outage.lock().succeeded(Instant::now());
            line.into_iter().for_each(|line| trace_outage(line, None));
        }
        Event::Uncertain { key, error } => {
            tracing::debug!(target: "dlock::lease", key = key.label(), %error, "uncertain");
            let line = outage.lock().failed(Instant::now());
            line.into_iter().for_each(|line| trace_outage(line, Some((key, error))));
        }
        Event::Lost { key, reason } => {
            tracing::error!(target: "dlock::lease", key = key.label(), %reason, "lost");
            let line = outage.lock().lost(Instant::now());
            line.into_iter().for_each(|line| trace_outage(line, None));
        }
    }
}

/// Logs a line about an outage, with the lock whose renewal failed just now.
fn trace_outage(line: Line, latest: Option<(&Key, &Error)>) {
    let key = latest.map(|(key, _)| key.label());
    let error = latest.map(|(_, error)| tracing::field::display(error));
    match line {
        Line::Began => tracing::warn!(
            target: "dlock::lease", key, error,
            "locks cannot be renewed; they are held until their deadline, and it is tried again"
        ),
        Line::GoesOn { since, counts: Counts { failed, lost } } => tracing::warn!(
            target: "dlock::lease", key, error, since_s = since.as_secs(), failed, lost,
            "locks still cannot be renewed"
        ),
        Line::Ended { lasted, counts: Counts { failed, lost } } => tracing::warn!(
            target: "dlock::lease", lasted_s = lasted.as_secs(), failed, lost,
            "locks can be renewed again"
        ),
    }
}
