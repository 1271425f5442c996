//! When it pays not to sleep until an answer comes.
//!
//! A worker that sleeps is woken by the kernel, which takes longer than a near server takes
//! to answer. So a reader that has just given callers their answers polls for the answers to
//! their next requests, and other tasks run in between. This costs processor time that would
//! be idle. So:
//! - it polls only after an answer, and until the oldest request has waited for [`LONGEST`];
//!   for one that has waited longer it looks once;
//! - it stops when other tasks take longer than [`LATE`] in between, or another process does,
//!   or those that were answered take longer than [`BUSY`]: they need the processor;
//! - after each failed try the next answers are waited for asleep: one, then three, seven and
//!   so on. A server that is not near, or a caller that does something else between two
//!   requests, costs one try in a thousand answers;
//! - in a process only one reader polls at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a reader polls before other tasks have their turn.
pub(super) const WITHOUT_YIELD: Duration = Duration::from_micros(10);
/// The longest time that a request may wait while a reader polls.
const LONGEST: Duration = Duration::from_micros(150);
/// The longest time between two polls.
const LATE: Duration = Duration::from_micros(60);
/// The longest time that callers take after their answers.
const BUSY: Duration = Duration::from_millis(1);
/// The most failed tries that are counted: after them 1,023 answers are waited for asleep.
const MAX_FAILED_TRIES: u32 = 10;

/// After so many failed tries, seven of eight answers are waited for asleep.
const MANY_FAILED_TRIES: u32 = 3;

/// Whether a reader of this process polls.
static POLLING: AtomicBool = AtomicBool::new(false);

/// Decides whether to poll for the next answer, by how the last tries ended.
#[derive(Debug, Default)]
pub(super) struct BusyPolls {
    /// How many answers are to be waited for asleep.
    skipped: u32,
    failed_tries: u32,
    /// Whether most answers come while they are polled for.
    pay: bool,
}

/// A try. It has failed if it is dropped.
#[derive(Debug)]
pub(super) struct Polling<'a>(&'a mut BusyPolls);

impl BusyPolls {
    /// Whether most answers come while they are polled for.
    pub(super) fn pay(&self) -> bool {
        self.pay
    }

    /// Begins a try; `None` if the next answer is to be waited for asleep.
    pub(super) fn start(&mut self) -> Option<Polling<'_>> {
        if self.skipped > 0 {
            self.skipped -= 1;
            return None;
        }
        if POLLING.swap(true, Ordering::Relaxed) {
            self.pay = false;
            return None;
        }
        Some(Polling(self))
    }
}

impl Polling<'_> {
    /// The answer came in time.
    pub(super) fn succeeded(self) {
        self.0.failed_tries = 0;
        self.0.pay = true;
        POLLING.store(false, Ordering::Relaxed);
        std::mem::forget(self);
    }
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        let polls = &mut *self.0;
        polls.failed_tries = (polls.failed_tries + 1).min(MAX_FAILED_TRIES);
        polls.skipped = (1 << polls.failed_tries) - 1;
        polls.pay &= polls.failed_tries < MANY_FAILED_TRIES;
        POLLING.store(false, Ordering::Relaxed);
    }
}

/// Whether to stop polling, after the request has waited for so long and so much time has
/// passed between two polls.
pub(super) fn is_too_long(waited: Duration, between_polls: Duration) -> bool {
    waited >= LONGEST || between_polls >= LATE
}

/// Whether not to poll at all, after callers took so long for their next requests.
pub(super) fn is_busy(took: Duration) -> bool {
    took >= BUSY
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: the tries of a process exclude each other.
    #[test]
    fn tries_that_fail_become_rare() {
        let mut polls = BusyPolls::default();
        let mut skipped = Vec::new();
        for _ in 0..12 {
            let failed = (0..).find(|_| polls.start().is_some()).unwrap_or(u32::MAX);
            skipped.push(failed);
        }
        assert_eq!(skipped, [0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1_023, 1_023]);
        assert!(!polls.pay());
        while polls.skipped > 0 {
            assert!(polls.start().is_none());
        }
        for _ in 0..10 {
            let polling = polls.start().expect("a server that is near is always polled");
            let mut others = BusyPolls { pay: true, ..BusyPolls::default() };
            assert!(others.start().is_none() && !others.pay(), "one reader at a time");
            polling.succeeded();
        }
        assert!(polls.pay());
        drop(polls.start());
        assert_eq!(polls.skipped, 1, "after a try that succeeded it begins anew");
        assert!(polls.pay(), "one failed try is no reason to give up");
    }

    #[test]
    fn polling_ends_in_time_and_when_something_else_needs_the_processor() {
        const SHORT: Duration = Duration::from_micros(3);
        assert!(!is_too_long(LONGEST - SHORT, LATE - SHORT));
        assert!(is_too_long(LONGEST, SHORT));
        assert!(is_too_long(SHORT, LATE));
    }
}
