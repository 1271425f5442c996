//! When an outage of the backend is logged. A client with many locks fails to renew each
//! of them several times; one line for each would hide everything else.
//!
//! The state machine, for one client:
//!
//! - *calm*: the first renewal that fails begins an outage. Line: `Began`.
//! - *outage*: failed renewals and lost locks are only counted. Once a minute, with the
//!   next of them: `Goes on`, with the counts so far. A renewal that succeeds after no
//!   renewal failed for [`QUIET`] ends it: `Ended`, with the counts and how long it
//!   lasted. So a backend that answers every other call is one outage, not many.
//! - An outage of which nothing was heard for [`FORGOTTEN`] is over without a line (all
//!   locks were released or lost): the next failure begins a new one.
//!
//! It does no I/O and has no clock: the caller gives the time. The requests of an inventory
//! are logged in the same way.

use std::time::{Duration, Instant};

/// How often an outage that goes on is logged.
const INTERVAL: Duration = Duration::from_secs(60);
/// For how long no renewal must have failed before an outage is over.
const QUIET: Duration = Duration::from_secs(5);
/// After how long without a failure an outage is forgotten.
const FORGOTTEN: Duration = Duration::from_secs(5 * 60);

/// Whether the client is in an outage, and what happened in it.
#[derive(Debug, Default)]
pub struct Outage(Option<Open>);

#[derive(Debug)]
struct Open {
    began: Instant,
    last_line: Instant,
    last_failure: Instant,
    /// The first renewal that succeeded after the last one that failed.
    recovered: Option<Instant>,
    counts: Counts,
}

/// What happened in an outage so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The renewals that failed.
    pub failed: u64,
    /// The locks that were lost.
    pub lost: u64,
}

/// A line to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub enum Line {
    /// The first failure.
    Began,
    /// A failure some time after the first one.
    GoesOn { since: Duration, counts: Counts },
    /// A success after some time without a failure.
    Ended { lasted: Duration, counts: Counts },
}

impl Outage {
    /// Whether the client is in an outage.
    pub fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// A renewal failed, or another request.
    pub fn failed(&mut self, now: Instant) -> Option<Line> {
        let is_old = |open: &Open| now.saturating_duration_since(open.last_failure) >= FORGOTTEN;
        if self.0.as_ref().is_none_or(is_old) {
            let counts = Counts { failed: 1, lost: 0 };
            self.0 = Some(Open {
                began: now,
                last_line: now,
                last_failure: now,
                recovered: None,
                counts,
            });
            return Some(Line::Began);
        }
        let open = self.0.as_mut()?;
        open.last_failure = now;
        open.recovered = None;
        open.counts.failed += 1;
        open.line_due(now)
    }

    /// A lock was lost. That is an outage only if renewals failed before.
    pub fn lost(&mut self, now: Instant) -> Option<Line> {
        let open = self.0.as_mut()?;
        open.counts.lost += 1;
        open.line_due(now)
    }

    /// A renewal succeeded, or another request.
    pub fn succeeded(&mut self, now: Instant) -> Option<Line> {
        let open = self.0.as_mut()?;
        let recovered = *open.recovered.get_or_insert(now);
        if now.saturating_duration_since(open.last_failure) < QUIET {
            return None;
        }
        let lasted = recovered.saturating_duration_since(open.began);
        let counts = open.counts;
        self.0 = None;
        Some(Line::Ended { lasted, counts })
    }
}

impl Open {
    fn line_due(&mut self, now: Instant) -> Option<Line> {
        if now.saturating_duration_since(self.last_line) < INTERVAL {
            return None;
        }
        self.last_line = now;
        let since = now.saturating_duration_since(self.began);
        Some(Line::GoesOn { since, counts: self.counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn two_hundred_locks_and_a_dead_server_are_a_few_lines() {
        let (mut outage, start) = (Outage::default(), Instant::now());
        let mut lines = Vec::new();
        for second in 0..150 {
            for lock in 0..200 {
                let now = start + seconds(second) + Duration::from_millis(lock);
                lines.extend(outage.failed(now));
            }
        }
        for _ in 0..200 {
            lines.extend(outage.lost(start + seconds(150)));
        }
        for second in 151..170 {
            lines.extend(outage.succeeded(start + seconds(second)));
        }
        let [Line::Began, Line::GoesOn { .. }, Line::GoesOn { since, counts }, ended] = lines[..]
        else {
            panic!("{lines:?}")
        };
        assert_eq!((since, counts.lost), (seconds(120), 0));
        let counts = Counts { failed: 150 * 200, lost: 200 };
        assert_eq!(ended, Line::Ended { lasted: seconds(151), counts });
    }

    #[test]
    fn a_server_that_answers_every_other_call_is_one_outage() {
        let (mut outage, start) = (Outage::default(), Instant::now());
        assert_eq!(outage.failed(start), Some(Line::Began));
        for second in 1..50 {
            let now = start + seconds(second);
            let line = if second % 2 == 0 { outage.failed(now) } else { outage.succeeded(now) };
            assert_eq!(line, None, "second {second}");
        }
    }

    #[test]
    fn a_new_outage_after_a_long_time_begins_anew() {
        let (mut outage, start) = (Outage::default(), Instant::now());
        assert_eq!(outage.failed(start), Some(Line::Began));
        assert_eq!(outage.failed(start + FORGOTTEN), Some(Line::Began));
        assert_eq!(outage.failed(start + FORGOTTEN + seconds(1)), None);
    }

    #[test]
    fn without_an_outage_nothing_is_logged() {
        let (mut outage, now) = (Outage::default(), Instant::now());
        assert_eq!(outage.succeeded(now), None);
        assert_eq!(outage.lost(now), None, "it was broken, say");
    }
}
