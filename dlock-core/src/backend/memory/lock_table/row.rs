//! Pure: one lock as bytes, for stores that keep each lock in a row of a table.
//!
//! A row is loaded into an empty [`LockTable`], the table decides as it always does, and
//! the row is unloaded again. So a store of rows needs no rules of its own.
//!
//! Layout 1, all numbers little-endian:
//!
//! ```text
//!   1                                      the layout
//!   count, and for each client: number, pid, name, host, tags
//!   count, and for each holder: index of its client, owner, mode, grant, since, expires, parked
//!   count, and for each waiter: index of its client, owner, mode, tokens, since, asked, sent, queue_ttl
//! ```
//!
//! A client that holds or waits more than once is written once, so each further holder
//! costs 70 bytes and each further waiter 73.

use std::sync::Arc;
use std::time::Duration;

use super::{Held, Lock, LockTable, Parked, Waiter};
use crate::claim::{Claim, Grant, Holder, Mode, Owner};
use crate::clock::{Moment, nanos};
use crate::key::Key;

const LAYOUT: u8 = 1;

/// A lock that was taken out of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UnloadedLock {
    /// The highest token that was given out.
    pub(crate) last: u64,
    /// The holders and waiters, as bytes.
    pub(crate) state: Vec<u8>,
    pub(crate) holders: usize,
    pub(crate) waiters: usize,
    /// The first holder, for people.
    pub(crate) holder: Option<String>,
    /// The latest moment at which a holder or waiter may still be there.
    pub(crate) until: Moment,
    /// Who broke the lock last.
    pub(crate) broken_by: Option<String>,
}

/// The bytes are not a lock of this layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnknownLayout;

impl LockTable {
    /// A key that is not loaded starts above this token.
    pub(crate) fn raise_floor(&mut self, floor: u64) {
        self.floor = self.floor.max(floor);
    }

    /// Adds a lock that was unloaded before.
    pub(crate) fn load(
        &mut self,
        key: &Key,
        permits: bool,
        last: u64,
        broken_by: Option<&str>,
        state: &[u8],
    ) -> Result<(), UnknownLayout> {
        let lock = read(state, last).ok_or(UnknownLayout)?;
        let space = if permits { &mut self.semaphores } else { &mut self.locks };
        space.insert(key.clone(), lock);
        if let Some(by) = broken_by
            && !self.broken.iter().any(|(broken, _)| broken == key)
        {
            self.broken.push_back((key.clone(), by.to_owned()));
        }
        Ok(())
    }

    /// Takes a lock out of the table. One that is not there is free.
    pub(crate) fn unload(&mut self, key: &Key, permits: bool) -> UnloadedLock {
        let floor = self.floor;
        let space = if permits { &mut self.semaphores } else { &mut self.locks };
        let lock = space.remove(key).unwrap_or_else(|| Lock::new(floor));
        let broken_by = self.broken.iter().find(|(broken, _)| broken == key);
        let ends = lock.holders.iter().map(|held| held.expires);
        let gives_up = lock.waiters.iter().map(|waiter| waiter.asked + waiter.queue_ttl);
        UnloadedLock {
            last: lock.last,
            state: write(&lock),
            holders: lock.holders.len(),
            waiters: lock.waiters.len(),
            holder: lock.holders.first().map(|held| held.holder.to_string()),
            until: ends.chain(gives_up).max().unwrap_or_default(),
            broken_by: broken_by.map(|(_, by)| by.clone()),
        }
    }

    /// Whether this owner holds the lock; what it has parked is no longer its own.
    pub(crate) fn is_held_by(&self, key: &Key, permits: bool, owner: Owner) -> bool {
        let space = if permits { &self.semaphores } else { &self.locks };
        let held =
            |lock: &Lock| lock.holders.iter().any(|it| it.owner == owner && it.parked.is_none());
        space.get(key).is_some_and(held)
    }

    /// Whether so many hold the lock and wait for it, and this owner is not one of them.
    pub(crate) fn is_full(&self, claim: &Claim, most: usize) -> bool {
        let space = if claim.mode.is_permits() { &self.semaphores } else { &self.locks };
        space.get(&claim.key).is_some_and(|lock| {
            lock.holders.len() + lock.waiters.len() >= most
                && !lock.holders.iter().any(|held| held.owner == claim.owner)
                && !lock.waiters.iter().any(|waiter| waiter.owner == claim.owner)
        })
    }

    /// Whether nobody holds the lock at this moment.
    pub(crate) fn has_no_holder(&self, now: Moment, key: &Key, permits: bool) -> bool {
        let space = if permits { &self.semaphores } else { &self.locks };
        space.get(key).is_none_or(|lock| lock.holders.iter().all(|held| held.expires <= now))
    }
}

fn write(lock: &Lock) -> Vec<u8> {
    let mut out = Writer(vec![LAYOUT]);
    let mut clients: Vec<&Arc<Holder>> = Vec::new();
    let holders = lock.holders.iter().map(|held| &held.holder);
    for client in holders.chain(lock.waiters.iter().map(|waiter| &waiter.holder)) {
        if index_of(&clients, client).is_none() {
            clients.push(client);
        }
    }
    out.count(clients.len());
    for client in &clients {
        out.holder(client);
    }
    let index = |client| index_of(&clients, client).unwrap_or_default();
    out.count(lock.holders.len());
    for held in &lock.holders {
        out.count(index(&held.holder));
        out.owner(held.owner);
        out.mode(held.mode);
        out.u64(held.grant.first);
        out.u32(held.grant.count);
        out.u64(held.since.as_nanos());
        out.u64(held.expires.as_nanos());
        out.0.push(match held.parked {
            None => 0,
            Some(Parked::Released) => 1,
            Some(Parked::Broken) => 2,
        });
    }
    out.count(lock.waiters.len());
    for waiter in lock.waiters.iter() {
        out.count(index(&waiter.holder));
        out.owner(waiter.owner);
        out.mode(waiter.mode);
        out.u32(waiter.tokens);
        out.u64(waiter.since.as_nanos());
        out.u64(waiter.asked.as_nanos());
        out.u64(waiter.sent.as_nanos());
        out.u64(nanos(waiter.queue_ttl));
    }
    out.0
}

fn index_of(clients: &[&Arc<Holder>], client: &Arc<Holder>) -> Option<usize> {
    clients.iter().position(|other| Arc::ptr_eq(other, client) || *other == client)
}

fn read(state: &[u8], last: u64) -> Option<Lock> {
    let mut from = Reader(state);
    if from.u8()? != LAYOUT {
        return None;
    }
    let mut lock = Lock::new(last);
    let mut clients = Vec::new();
    for _ in 0..from.u32()? {
        clients.push(Arc::new(from.holder()?));
    }
    for _ in 0..from.u32()? {
        let holder = clients.get(from.index()?)?.clone();
        lock.holders.push(Held {
            holder,
            owner: from.owner()?,
            mode: from.mode()?,
            grant: Grant { first: from.u64()?, count: from.u32()? },
            since: Moment::from_nanos(from.u64()?),
            expires: Moment::from_nanos(from.u64()?),
            parked: match from.u8()? {
                0 => None,
                1 => Some(Parked::Released),
                2 => Some(Parked::Broken),
                _ => return None,
            },
        });
    }
    for _ in 0..from.u32()? {
        let holder = clients.get(from.index()?)?.clone();
        lock.waiters.push_back(Waiter {
            holder,
            owner: from.owner()?,
            mode: from.mode()?,
            tokens: from.u32()?,
            since: Moment::from_nanos(from.u64()?),
            asked: Moment::from_nanos(from.u64()?),
            sent: Moment::from_nanos(from.u64()?),
            queue_ttl: Duration::from_nanos(from.u64()?),
        });
    }
    lock.count_soonest();
    from.0.is_empty().then_some(lock)
}

struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, number: u32) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn count(&mut self, count: usize) {
        self.u32(u32::try_from(count).unwrap_or(u32::MAX));
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.0.extend_from_slice(text.as_bytes());
    }

    fn owner(&mut self, owner: Owner) {
        self.0.extend_from_slice(&owner.bits().to_le_bytes());
    }

    fn mode(&mut self, mode: Mode) {
        let (letter, count, of) = match mode {
            Mode::Exclusive => (b'x', 0, 0),
            Mode::Shared => (b's', 0, 0),
            Mode::Permits { count, of } => (b'p', count, of),
        };
        self.0.push(letter);
        self.u32(count);
        self.u32(of);
    }

    fn holder(&mut self, holder: &Holder) {
        self.u64(holder.client);
        self.u32(holder.pid);
        self.text(&holder.name);
        self.text(&holder.host);
        self.count(holder.tags.len());
        for (name, value) in &holder.tags {
            self.text(name);
            self.text(value);
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes(&mut self, count: usize) -> Option<&[u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u8(&mut self) -> Option<u8> {
        self.bytes(1)?.first().copied()
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.bytes(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes(8)?.try_into().ok()?))
    }

    fn index(&mut self) -> Option<usize> {
        usize::try_from(self.u32()?).ok()
    }

    fn text(&mut self) -> Option<String> {
        let length = self.index()?;
        String::from_utf8(self.bytes(length)?.to_vec()).ok()
    }

    fn owner(&mut self) -> Option<Owner> {
        let bits = u128::from_le_bytes(self.bytes(16)?.try_into().ok()?);
        Some(Owner::from_bits(bits))
    }

    fn mode(&mut self) -> Option<Mode> {
        let (letter, count, of) = (self.u8()?, self.u32()?, self.u32()?);
        match letter {
            b'x' => Some(Mode::Exclusive),
            b's' => Some(Mode::Shared),
            b'p' => Some(Mode::Permits { count, of }),
            _ => None,
        }
    }

    fn holder(&mut self) -> Option<Holder> {
        let (client, pid) = (self.u64()?, self.u32()?);
        let (name, host) = (self.text()?, self.text()?);
        let mut tags = Vec::new();
        for _ in 0..self.u32()? {
            tags.push((self.text()?, self.text()?));
        }
        Some(Holder { client, name, host, pid, tags })
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;
    use crate::backend::{Break, BreakTarget};
    use crate::claim::Release;
    use crate::planted_bug::PlantedBug;

    fn table() -> LockTable {
        LockTable::new(1_000, PlantedBug::default())
    }

    fn claim(random: &mut StdRng, key: &Key) -> Claim {
        let owner = random.random_range(1..8);
        let mode = match owner {
            1 | 2 => Mode::Exclusive,
            3 | 4 => Mode::Shared,
            _ => Mode::Permits { count: random.random_range(1..3), of: 4 },
        };
        let name = format!("client-{}\n\u{1F389}", owner % 3);
        let tags = vec![("job".to_owned(), String::new()); random.random_range(0..3)];
        Claim {
            key: key.clone(),
            owner: Owner::from_bits(owner),
            mode,
            ttl: Duration::from_millis(random.random_range(1..400)),
            queue: random.random_bool(0.8),
            instead_of: None,
            tokens: random.random_range(1..5),
            holder: Arc::new(Holder { client: 7, name, host: "h".into(), pid: 1, tags }),
            sent: Moment::from_nanos(random.random()),
        }
    }

    /// A table that is written and read between any two calls answers as one that is not.
    #[test]
    fn a_lock_is_the_same_after_it_was_written_and_read() {
        let key = Key::new("a").unwrap();
        for seed in 0..300 {
            let mut random = StdRng::seed_from_u64(seed);
            let (mut kept, mut stored) = (table(), table());
            let mut rows: [Option<UnloadedLock>; 2] = [None, None];
            let mut now = Moment::from_nanos(1_000_000_000);
            for _ in 0..60 {
                now = now + Duration::from_millis(random.random_range(0..120));
                for (permits, row) in [false, true].into_iter().zip(&rows) {
                    if let Some(row) = row {
                        let by = row.broken_by.as_deref();
                        stored.load(&key, permits, row.last, by, &row.state).unwrap();
                    }
                }
                let (mut ours, mut theirs) = (Vec::new(), Vec::new());
                let claim = claim(&mut random, &key);
                let (our, their) = match random.random_range(0..10) {
                    0..5 => (
                        format!("{:?}", kept.acquire(now, &claim, &mut ours)),
                        format!("{:?}", stored.acquire(now, &claim, &mut theirs)),
                    ),
                    5..7 => (
                        format!("{:?}", kept.renew(now, &claim, &mut ours)),
                        format!("{:?}", stored.renew(now, &claim, &mut theirs)),
                    ),
                    7..9 => {
                        let how = match random.random_bool(0.3) {
                            true => Release::After(Duration::from_millis(200)),
                            false => Release::Now,
                        };
                        (
                            format!("{:?}", kept.release(now, &claim, how, &mut ours)),
                            format!("{:?}", stored.release(now, &claim, how, &mut theirs)),
                        )
                    }
                    _ => {
                        let shown = kept.inspect(now, &key).holders;
                        let token = shown.first().and_then(|held| held.token).unwrap_or(1);
                        let target = [
                            BreakTarget::Lock,
                            BreakTarget::Holder { token },
                            BreakTarget::Permits,
                        ][random.random_range(0..3)];
                        let (by, delay) = (claim.holder.clone(), Duration::from_millis(100));
                        let how = Break { by, target, delay };
                        let broken = kept.break_lock(now, &key, &how, &mut ours);
                        let also = stored.break_lock(now, &key, &how, &mut theirs);
                        (broken.to_string(), also.to_string())
                    }
                };
                assert_eq!(our, their, "seed {seed}");
                assert_eq!(format!("{ours:?}"), format!("{theirs:?}"), "seed {seed}");
                let shown = format!("{:?}", kept.inspect(now, &key));
                assert_eq!(shown, format!("{:?}", stored.inspect(now, &key)), "seed {seed}");
                rows = [false, true].map(|permits| Some(stored.unload(&key, permits)));
            }
        }
    }

    #[test]
    fn other_bytes_are_not_a_lock() {
        let key = Key::new("a").unwrap();
        let mut random = StdRng::seed_from_u64(1);
        let mut from = table();
        let held = Claim { mode: Mode::Exclusive, ..claim(&mut random, &key) };
        from.acquire(Moment::from_nanos(1), &held, &mut Vec::new());
        let state = from.unload(&key, false).state;
        assert!(read(&state, 0).is_some());
        for length in 0..state.len() {
            assert!(read(&state[..length], 0).is_none(), "cut at {length}");
        }
        let longer: Vec<u8> = state.iter().copied().chain([0]).collect();
        assert!(read(&longer, 0).is_none());
        assert!(read(&[9, 0, 0, 0, 0], 0).is_none(), "another layout");
    }
}
