//! Which segments were dry a moment ago, for all segmented locks of a client.

use dlock::Key;
use hashbrown::HashMap;
use parking_lot::Mutex;
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

    pub(crate) fn remember(&self, key: &Key, index: usize, until: Instant) {
        let mut known = self.0.lock();
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
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn what_is_over_is_forgotten() {
        let memory = DrySegments::default();
        for number in 0..10_000 {
            let key = Key::new(format!("k{number}")).unwrap();
            memory.remember(&key, 3, Instant::now() + Duration::from_millis(10));
            assert_eq!(memory.of(&key, Instant::now()), [3]);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(memory.0.lock().keys.len() < 200);
        let last = Key::new("k9999").unwrap();
        tokio::time::advance(Duration::from_millis(10)).await;
        assert!(memory.of(&last, Instant::now()).is_empty());
    }
}
