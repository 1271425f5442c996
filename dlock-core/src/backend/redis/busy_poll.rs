//! When it pays not to sleep until an answer comes: pure.
//!
//! A worker that sleeps is woken by the kernel, which takes longer than a near server takes
//! to answer. So a reader that has just given a caller its answer looks again and again for
//! the answer to the caller's next request, and other tasks run in between. This costs
//! processor time that would be idle. So:
//! - it is done for a lone request only that follows an answer at once, and for [`LONGEST`] at
//!   most;
//! - it ends when a look comes late, because something else needs the processor;
//! - after each try in vain, the next answers are waited for asleep: one, then three, seven
//!   and so on. A server that is not near, or a caller that does something else between two
//!   requests, costs one try in a thousand answers.

use std::time::Duration;

/// The longest time that an answer is looked for.
const LONGEST: Duration = Duration::from_micros(150);
/// Between two looks something else ran that took this long.
const LATE: Duration = Duration::from_micros(50);
/// The most tries in vain that are counted: after them 1,023 answers are waited for asleep.
const MOST_TRIES_IN_VAIN: u32 = 10;

/// The tries so far.
#[derive(Debug, Default)]
pub(super) struct BusyPoll {
    /// How many answers are to be waited for asleep.
    skipped: u32,
    tries_in_vain: u32,
}

impl BusyPoll {
    /// Whether the next answer is looked for.
    pub(super) fn is_worth_it(&mut self) -> bool {
        let is_skipped = self.skipped > 0;
        self.skipped -= u32::from(is_skipped);
        !is_skipped
    }

    /// The answer came while it was looked for.
    pub(super) fn answered(&mut self) {
        self.tries_in_vain = 0;
    }

    /// No answer came in time, or there was no request.
    pub(super) fn in_vain(&mut self) {
        self.tries_in_vain = (self.tries_in_vain + 1).min(MOST_TRIES_IN_VAIN);
        self.skipped = (1 << self.tries_in_vain) - 1;
    }
}

/// Whether to stop looking, after the request has waited for so long and so much time has
/// passed since the last look.
pub(super) fn is_too_long(waited: Duration, since_last_look: Duration) -> bool {
    waited >= LONGEST || since_last_look >= LATE
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many answers are waited for asleep until the next is looked for.
    fn skipped(policy: &mut BusyPoll) -> u32 {
        (0..).find(|_| policy.is_worth_it()).unwrap_or(u32::MAX)
    }

    #[test]
    fn a_near_server_is_always_looked_at() {
        let mut policy = BusyPoll::default();
        for _ in 0..10 {
            assert_eq!(skipped(&mut policy), 0);
            policy.answered();
        }
    }

    #[test]
    fn a_server_that_is_not_near_is_looked_at_less_and_less() {
        let mut policy = BusyPoll::default();
        let mut seen = Vec::new();
        for _ in 0..12 {
            seen.push(skipped(&mut policy));
            policy.in_vain();
        }
        assert_eq!(seen, [0, 1, 3, 7, 15, 31, 63, 127, 255, 511, 1_023, 1_023]);
        assert_eq!(skipped(&mut policy), 1_023);
        policy.answered();
        policy.in_vain();
        assert_eq!(skipped(&mut policy), 1, "one answer in time, and it begins anew");
    }

    #[test]
    fn it_ends_in_time_and_when_something_else_needs_the_processor() {
        const SHORT: Duration = Duration::from_micros(3);
        assert!(!is_too_long(LONGEST - SHORT, LATE - SHORT));
        assert!(is_too_long(LONGEST, SHORT));
        assert!(is_too_long(SHORT, LATE));
    }
}
