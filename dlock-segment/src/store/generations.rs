//! The generations of the records of operations.
//!
//! Time is divided into periods as long as the retention, and the records that are written
//! in one period are a *generation*. They are found in that period and in the next one, so
//! that a record is found for at least one retention and at most two.
//!
//! A change of the retention renumbers nothing: the generation that is written to goes on,
//! and lasts for one new retention from the change on. So everything that was found at the
//! change is found for at least one new retention more, and at most two.

/// The number of the first generation of an inventory.
pub(crate) const FIRST: u64 = 1;

/// How generations are numbered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named like what they hold")]
pub struct Generations {
    /// When the generation `number` began, in milliseconds of Unix time.
    pub since: u64,
    pub number: u64,
    /// How long each lasts, in milliseconds.
    pub retention: u64,
}

impl Generations {
    /// The generations of a new inventory. Each inventory has a phase of its own, so that
    /// the records of many inventories do not end at the same moment.
    pub(crate) fn new(birth: u64, retention: u64) -> Self {
        const STEPS: u64 = 8_191;
        let phase = birth % STEPS * (retention / STEPS);
        Generations { since: birth / 1_000 + 1 + phase, number: FIRST + 1, retention }
    }

    /// The number of the generation at this time.
    pub(crate) fn at(&self, now: u64) -> u64 {
        let passed = (now as i64 - self.since as i64).div_euclid(self.retention.max(1) as i64);
        u64::try_from(self.number as i64 + passed).unwrap_or(0).max(FIRST)
    }

    /// Since when every record is found, in milliseconds of Unix time; 0 if none is forgotten.
    /// After a change of the retention, it is not known how far back the generation before
    /// reached.
    pub(crate) fn remembered_since(&self, now: u64) -> u64 {
        let oldest = self.at(now).saturating_sub(1);
        if oldest <= FIRST {
            return 0;
        }
        self.since + oldest.saturating_sub(self.number) * self.retention
    }

    /// The generations after the retention was changed, if `written` was written to last.
    pub(crate) fn change(&self, now: u64, written: u64, retention: u64) -> Self {
        Generations { since: now, number: self.at(now).max(written), retention }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 24 * 3_600_000;
    const BIRTH: u64 = 1_763_000_000_000_000;

    /// The records of sales that are made together do not end together.
    #[test]
    fn each_sale_has_a_phase() {
        let ends = |birth| {
            let (now, generations) = (birth / 1_000, Generations::new(birth, DAY));
            (now..).step_by(60_000).find(|now| generations.at(*now) > FIRST)
        };
        let ends: std::collections::BTreeSet<_> =
            (0..100).map(|at| ends(BIRTH + at * 150)).collect();
        assert!(ends.len() > 90, "{ends:?}");
    }

    #[test]
    fn the_first_is_always_the_same() {
        for birth in (BIRTH..).step_by(997).take(1_000) {
            for retention in [1, 15, 8_191, DAY] {
                let generations = Generations::new(birth, retention);
                assert_eq!(generations.at(birth / 1_000), FIRST, "{birth} {retention}");
                assert_eq!(generations.at(0), FIRST, "the clock was set back");
                assert!(generations.at(birth / 1_000 + retention) > FIRST);
            }
        }
    }

    /// What is placed is not too old for at least one retention, and what is not found is.
    #[test]
    fn what_was_placed_is_found_or_too_old() {
        for retention in [1, 15, 8_191, DAY] {
            let mut generations = Generations::new(BIRTH, retention);
            let birth = BIRTH / 1_000;
            for round in 0..40 {
                let now = birth + round * (retention / 3).max(1);
                if round == 20 {
                    generations = generations.change(now, generations.at(now), retention);
                }
                let since = generations.remembered_since(now);
                for placed in [birth, now - (now - birth) / 2, now] {
                    let is_found = generations.at(placed) + 1 >= generations.at(now);
                    assert!(is_found || placed < since, "{retention} {round} {placed}");
                }
                let is_changed = round >= 20 && now < generations.since + retention;
                assert!(is_changed || since <= now - (now - birth).min(retention));
            }
        }
    }

    /// What was found at a change is found for at least one new retention, at most two.
    #[test]
    fn a_change_of_the_retention_forgets_nothing_early() {
        let generations = Generations::new(BIRTH, DAY);
        for now in (BIRTH / 1_000..).step_by(3_600_000).take(100) {
            let written = generations.at(now);
            for retention in [1_000, DAY, 90 * DAY] {
                let after = generations.change(now, written, retention);
                assert!(written <= after.at(now), "it is still written to");
                let found = |of: u64, at| of + 1 >= after.at(at);
                assert!(found(written - 1, now + retention - 1), "the one before it");
                assert!(found(written, now + 2 * retention - 1));
                assert!(!found(written, now + 2 * retention));
            }
        }
    }
}
