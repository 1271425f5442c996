//! Hash maps for keys that are random numbers or hashes already.

use std::hash::{BuildHasher as _, BuildHasherDefault, Hasher};
use std::sync::OnceLock;

use hashbrown::DefaultHashBuilder;

/// A hash map whose keys are used as their own hash.
pub(crate) type Map<K, V> = hashbrown::HashMap<K, V, BuildHasherDefault<IdentityHasher>>;

/// The hash of a string, with a random seed, because keys contain what users typed.
pub(crate) fn hash_of(key: &str) -> u64 {
    static SEED: OnceLock<DefaultHashBuilder> = OnceLock::new();
    SEED.get_or_init(DefaultHashBuilder::default).hash_one(key)
}

/// A hasher that returns the number that it is given.
#[derive(Debug, Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}
