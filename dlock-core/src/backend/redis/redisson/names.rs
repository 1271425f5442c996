//! The names that Redisson gives to a lock, its channel and its holder.

use crate::claim::{Claim, Owner};
use crate::key::Key;

/// What Redisson puts before the name of a lock's channel.
const CHANNEL: &str = "redisson_lock__channel";
/// What is before the name of our own record of a lock.
const RECORD: &str = "dlock:2:r";
/// What is before the name of those who wait for a lock.
const WAITERS: &str = "dlock:2:rw";
/// The namespace whose keys are the names of locks as they are.
const BARE: &str = "default";

/// The names of the locks of one namespace.
#[derive(Clone, Debug)]
pub(super) struct Names {
    prefix: String,
}

impl Names {
    pub(super) fn new(namespace: &str) -> Self {
        let prefix = if namespace == BARE { String::new() } else { format!("{namespace}:") };
        Names { prefix }
    }

    /// The name of a lock, as `getLock` of Redisson takes it.
    pub(super) fn lock(&self, key: &Key) -> String {
        format!("{}{}", self.prefix, key.as_str())
    }

    /// The channel on which the release of a lock is told.
    pub(super) fn channel(&self, key: &Key) -> String {
        in_the_slot_of(CHANNEL, &self.lock(key))
    }

    /// The keys of a lock: the lock itself, what dlock knows besides, and who waits.
    pub(super) fn keys(&self, key: &Key) -> [String; 3] {
        let lock = self.lock(key);
        let (record, waiters) = (in_the_slot_of(RECORD, &lock), in_the_slot_of(WAITERS, &lock));
        [lock, record, waiters]
    }
}

/// A name beside that of a lock, in the same slot of a cluster, as Redisson makes it.
fn in_the_slot_of(prefix: &str, lock: &str) -> String {
    if lock.contains('{') { format!("{prefix}:{lock}") } else { format!("{prefix}:{{{lock}}}") }
}

/// The field of a holder. Redisson writes the id of its client, a UUID, and the number of
/// a thread; here every claim has a UUID of its own, and the number is that of the process.
pub(super) fn field(claim: &Claim) -> String {
    field_of(claim.owner, claim.holder.pid)
}

/// The field of an owner in the process with this id.
pub(super) fn field_of(owner: Owner, pid: u32) -> String {
    let hex = owner.to_string();
    format!("{}-{}-{}-{}-{}:{pid}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_redisson() {
        let key = |text: &str| Key::new(text).unwrap();
        let names = Names::new("default");
        assert_eq!(names.lock(&key("order:7")), "order:7");
        assert_eq!(names.channel(&key("order:7")), "redisson_lock__channel:{order:7}");
        assert_eq!(names.channel(&key("{shop}:7")), "redisson_lock__channel:{shop}:7");
        let keys = ["order:7", "dlock:2:r:{order:7}", "dlock:2:rw:{order:7}"];
        assert_eq!(names.keys(&key("order:7")), keys);
        assert_eq!(Names::new("shop").lock(&key("order:7")), "shop:order:7");
    }

    #[test]
    fn a_field_is_a_uuid_and_a_number() {
        let owner = Owner::from_bits(0x0123_4567_89ab_cdef_0011_2233_4455_6677);
        assert_eq!(field_of(owner, 42), "01234567-89ab-cdef-0011-223344556677:42");
    }
}
