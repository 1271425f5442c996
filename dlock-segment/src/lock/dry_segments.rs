//! Which segments were dry a moment ago, for all segmented locks of a client.
//!
//! A segment that was dry is not offered until its mark ends, by time or by a restock. So
//! a pass over a key whose segments all have a mark takes no lock. The marks end at
//! different times ([`until`]): then one request finds one segment to look at again, and
//! not all segments at once.

use std::time::Duration;

use dlock::Key;
use hashbrown::HashMap;
use parking_lot::Mutex;
use rand::RngExt as _;
use tokio::time::Instant;

/// With fewer keys than this, expired ones are not searched for.
const MIN_SWEEP_KEYS: usize = 64;

/// The dry segments of each key, and until when each is remembered.
#[derive(Default)]
pub(crate) struct DrySegments(Mutex<Known>);

#[derive(Default)]
struct Known {
    keys: HashMap<Key, Vec<(usize, Instant)>>,
    /// The number of keys at which the next sweep is made.
    sweep_at: usize,
    /// How many restocks were signalled, of any key.
    restocks: u64,
}

/// When a mark that is made now ends: after at least half of `dry_for`, and at most all of
/// it.
pub(crate) fn until(now: Instant, dry_for: Duration) -> Instant {
    now + dry_for.mul_f64(rand::rng().random_range(0.5..=1.0))
}

impl DrySegments {
    /// The segments known to be dry now, in order.
    pub(crate) fn of(&self, key: &Key, now: Instant) -> Vec<usize> {
        let mut known = self.0.lock();
        let Some(dry) = known.keys.get_mut(key) else { return Vec::new() };
        dry.retain(|(_, until)| *until > now);
        let mut indices: Vec<usize> = dry.iter().map(|(index, _)| *index).collect();
        if dry.is_empty() {
            known.keys.remove(key);
        }
        indices.sort_unstable();
        indices
    }

    pub(crate) fn is_dry(&self, key: &Key, index: usize, now: Instant) -> bool {
        let known = self.0.lock();
        let marks = known.keys.get(key);
        marks.is_some_and(|dry| dry.iter().any(|(known, until)| *known == index && *until > now))
    }

    /// The number of restocks so far, for [`remember`](Self::remember).
    pub(crate) fn restocks(&self) -> u64 {
        self.0.lock().restocks
    }

    /// Ends all marks of the key, and prevents those by work that began before.
    pub(crate) fn restocked(&self, key: &Key) {
        let mut known = self.0.lock();
        known.restocks += 1;
        known.keys.remove(key);
    }

    /// Marks a segment as dry, unless there was a restock since the segment was offered.
    pub(crate) fn remember(&self, key: &Key, index: usize, until: Instant, restocks: u64) {
        let mut known = self.0.lock();
        if known.restocks != restocks {
            return;
        }
        if known.keys.len() >= known.sweep_at.max(MIN_SWEEP_KEYS) {
            let now = Instant::now();
            known.keys.retain(|_, dry| dry.iter().any(|(_, until)| *until > now));
            known.sweep_at = known.keys.len() * 2;
        }
        let dry = known.keys.entry(key.clone()).or_default();
        dry.retain(|(known, _)| *known != index);
        dry.push((index, until));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_over_is_forgotten() {
        let memory = DrySegments::default();
        for number in 0..10_000 {
            let key = Key::new(format!("k{number}")).unwrap();
            memory.remember(&key, 3, Instant::now() + Duration::from_millis(10), 0);
            assert_eq!(memory.of(&key, Instant::now()), [3]);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(memory.0.lock().keys.len() < 200);
        let last = Key::new("k9999").unwrap();
        tokio::time::advance(Duration::from_millis(10)).await;
        assert!(memory.of(&last, Instant::now()).is_empty());
    }
}
