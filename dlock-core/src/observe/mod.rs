//! What can be seen of a client: `tracing` events, metrics, and a hook.
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
//! With the feature `metrics`: counters `dlock_acquired_total`,
//! `dlock_waited_total`, `dlock_handed_over_total`, `dlock_refused_total`
//! (with `kind`), `dlock_renewed_total`, `dlock_uncertain_total`,
//! `dlock_lost_total`, histograms `dlock_wait_seconds` and `dlock_hold_seconds`.
//!
//! `key` is the key's template or the name given in code, not its values; for a
//! key made from a plain text it is that text: see
//! [`Key::label`](crate::Key::label). The metrics' label `lock` is the template
//! or the name, else `unnamed`.

#[cfg(feature = "metrics")]
mod metrics;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::claim::LossReason;
use crate::error::Error;
use crate::key::Key;

/// Something that happened to a lock of this client.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub enum Event<'a> {
    /// A task got a lock.
    Acquired { key: &'a Key, token: Option<u64>, waited: Duration, handed_over: bool },
    /// A task did not get it.
    Refused { key: &'a Key, error: &'a Error },
    /// A task let go of it.
    Released { key: &'a Key, held: Duration },
    /// A lease was prolonged.
    Renewed { key: &'a Key },
    /// A lease could not be prolonged yet.
    Uncertain { key: &'a Key, error: &'a Error },
    /// A lock was lost while it was held.
    Lost { key: &'a Key, reason: &'a LossReason },
}

pub(crate) type Hook = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// Whom events are told.
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

    pub(crate) fn tell(&self, event: &Event<'_>) {
        trace(event);
        #[cfg(feature = "metrics")]
        metrics::count(event);
        if let Some(hook) = &self.hook {
            // Somebody else's code on the driver's thread, or in a drop: its panic
            // must not end either.
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| hook(event)));
            if told.is_err() {
                tracing::error!(target: "dlock::lock", "the on_event hook panicked");
            }
        }
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
