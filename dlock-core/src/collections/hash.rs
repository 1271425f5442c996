//! Maps whose keys are random, or hashed, already.

use std::hash::{BuildHasher as _, BuildHasherDefault, Hasher};
use std::sync::OnceLock;

use hashbrown::DefaultHashBuilder;

/// A map by keys that hash to themselves.
pub(crate) type Map<K, V> = hashbrown::HashMap<K, V, BuildHasherDefault<AsItIs>>;

/// The hash of a text, with a seed that nobody outside knows: keys hold what
/// users typed.
pub(crate) fn hash_of(text: &str) -> u64 {
    static SEED: OnceLock<DefaultHashBuilder> = OnceLock::new();
    SEED.get_or_init(DefaultHashBuilder::default).hash_one(text)
}

/// Hashes a number to itself.
#[derive(Debug, Default)]
pub(crate) struct AsItIs(u64);

impl Hasher for AsItIs {
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
