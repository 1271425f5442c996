//! Pure: a server's side of every lock. The embedded backend runs it, the
//! simulation uses it as its server, and the scripts of a real server must do
//! the same.
//!
//! Per key there are *holders* and a first-in-first-out queue of *waiters*.
//!
//! - A holder lasts until its `expires`; renewing moves that. At `expires` it is
//!   gone, whoever looks first.
//! - A waiter lasts for its queue ttl from its last asking; one that asks too late
//!   has lost its place. Dead ones at the head are dropped all at once.
//! - Whenever a key is touched it is *settled*: expired holders go, and as long
//!   as the first live waiter fits beside the holders it becomes one. Such a
//!   hand-over lasts for the queue ttl from the waiter's last asking, not from
//!   now: the waiter counts from there, since the message may be late. Its first
//!   renewal makes it an ordinary lease.
//!
//! Invariants: the holders fit together (one exclusive, or any number of shared
//! ones, or permits up to what each brought); nobody overtakes a live waiter; an
//! owner is a holder or a waiter or neither; tokens rise per key, also over a
//! restart without data, since a counter that is not known starts at the
//! server's time in microseconds.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::claim::{
    AcquireOutcome, Claim, Grant, Holder, Mode, Notice, Owner, Release, ReleaseOutcome,
    RenewOutcome,
};
use crate::clock::Moment;
use crate::collections::LazyQueue;
use crate::collections::Map;
use crate::key::Key;
use crate::planted_bug::{Bug, PlantedBug};

mod operators;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
pub(crate) mod row;

/// A notice and its receiver.
#[derive(Clone, Debug)]
pub struct SentNotice {
    /// The client that receives it.
    pub client: u64,
    /// The key that the notice is about.
    pub key: Key,
    /// The owner of the claim.
    pub owner: Owner,
    /// The notice itself.
    pub notice: Notice,
}

/// The locks of one store.
#[derive(Debug)]
pub struct LockTable {
    locks: Map<Key, Lock>,
    semaphores: Map<Key, Lock>,
    /// The server's time in microseconds when its clock shows zero.
    epoch_micros: u64,
    /// The highest token of a key that is no longer kept.
    floor: u64,
    /// How many keys the last sweep left.
    swept: usize,
    /// The key that was left empty last, and whether as a semaphore.
    empty: Option<(bool, Key)>,
    /// The latest breaks, for operators.
    broken: VecDeque<(Key, String)>,
    planted: PlantedBug,
}

#[derive(Debug)]
struct Lock {
    holders: SmallVec<[Held; 1]>,
    waiters: LazyQueue<Waiter>,
    /// The highest token given out.
    last: u64,
    /// The earliest end of a holder.
    soonest: Moment,
}

#[derive(Debug)]
struct Held {
    owner: Owner,
    mode: Mode,
    grant: Grant,
    since: Moment,
    expires: Moment,
    /// Set if the lease is over, but the key stays taken until it expires.
    parked: Option<Parked>,
    holder: Arc<Holder>,
}

/// Why a lease is over though the key stays taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parked {
    /// It was released with [`Release::After`].
    Released,
    /// It was broken; the holder is to hear of it before somebody else is let in.
    Broken,
}

#[derive(Debug)]
struct Waiter {
    owner: Owner,
    mode: Mode,
    tokens: u32,
    since: Moment,
    asked: Moment,
    /// The moment that its claim names, by the clock of the client, not of this server.
    sent: Moment,
    queue_ttl: Duration,
    holder: Arc<Holder>,
}

impl Waiter {
    fn is_alive(&self, now: Moment) -> bool {
        now < self.asked + self.queue_ttl
    }
}

/// From this many waiters on, not all of them are searched for dead ones.
const FEW_WAITERS: usize = 16;
const BREAKS_KEPT: usize = 64;
const PAGE: usize = 100;

impl LockTable {
    /// An empty store on a server whose clock, at its zero, is this far from
    /// the epoch.
    pub fn new(epoch_micros: u64, planted: PlantedBug) -> Self {
        LockTable {
            locks: Map::default(),
            semaphores: Map::default(),
            epoch_micros,
            floor: 0,
            swept: 0,
            empty: None,
            broken: VecDeque::new(),
            planted,
        }
    }

    /// Answers [`Request::Acquire`](crate::backend::Request::Acquire).
    pub fn acquire(
        &mut self,
        now: Moment,
        claim: &Claim,
        out: &mut Vec<SentNotice>,
    ) -> AcquireOutcome {
        self.sweep(now);
        let minting = self.minting(now);
        let floor = self.floor;
        let space = if claim.mode.is_permits() { &mut self.semaphores } else { &mut self.locks };
        let lock = space.entry_ref(&claim.key).or_insert_with(|| Lock::new(floor));

        if let Some(old) = claim.instead_of {
            lock.remove(old);
        }
        lock.expire(now);
        if let Some(held) = lock.held(claim.owner) {
            held.expires = now + claim.ttl;
            let grant = held.grant;
            lock.count_soonest();
            return AcquireOutcome::Granted(grant);
        }
        let mut place = lock.waiters.iter().position(|waiter| waiter.owner == claim.owner);
        if place.and_then(|place| lock.waiters.get_mut(place)).is_some_and(|it| !it.is_alive(now)) {
            lock.remove(claim.owner);
            place = None;
        }
        if let Some(waiter) = place.and_then(|place| lock.waiters.get_mut(place)) {
            waiter.asked = now;
            waiter.sent = claim.sent;
            waiter.queue_ttl = claim.queue_ttl();
        }
        let told_before = out.len();
        lock.settle(minting, &claim.key, out);

        // Settling may just have given it to this very claim: then this reply
        // says so, with a whole ttl, and no notice is needed.
        if let Some(held) = lock.held(claim.owner) {
            held.expires = now + claim.ttl;
            let grant = held.grant;
            lock.count_soonest();
            let told = out[told_before..].iter().position(|sent| sent.owner == claim.owner);
            told.map(|place| out.remove(told_before + place));
            return AcquireOutcome::Granted(grant);
        }
        if lock.waiters.is_empty() && lock.fits(claim.mode, minting) {
            let grant = lock.hold(minting, claim, now + claim.ttl);
            return AcquireOutcome::Granted(grant);
        }
        let holder = lock.holders.first().map(|held| held.holder.clone());
        if !claim.queue {
            return AcquireOutcome::Busy { holder };
        }
        if place.is_none() {
            // Whenever their number has doubled the dead are dropped, also behind one that
            // lives: a constant cost for each.
            if lock.waiters.len() >= FEW_WAITERS && lock.waiters.len().is_power_of_two() {
                lock.waiters.retain(|waiter| waiter.is_alive(now));
            }
            lock.waiters.push_back(Waiter {
                owner: claim.owner,
                mode: claim.mode,
                tokens: claim.tokens,
                since: now,
                asked: now,
                sent: claim.sent,
                queue_ttl: claim.queue_ttl(),
                holder: claim.holder.clone(),
            });
        }
        let free_in = (lock.soonest < Moment::NEVER).then(|| lock.soonest.since(now));
        AcquireOutcome::Queued { holder, free_in }
    }

    /// Answers [`Request::Renew`](crate::backend::Request::Renew).
    pub fn renew(&mut self, now: Moment, lease: &Claim, out: &mut Vec<SentNotice>) -> RenewOutcome {
        let (minting, planted) = (self.minting(now), self.planted);
        let Some(lock) = self.space(lease.mode).get_mut(&lease.key) else {
            return RenewOutcome::Lost;
        };
        lock.expire(now);
        let answer = match lock.held(lease.owner) {
            Some(held) => {
                if lease.tokens == 0 || !planted.is(Bug::ExtensionWithoutRenewal) {
                    held.expires = now + lease.ttl;
                }
                if held.mode == Mode::Exclusive {
                    held.mode = lease.mode; // an old renewal must not turn it back
                }
                lock.count_soonest();
                lock.settle(minting, &lease.key, out);
                let others_wait = lock.waiters.iter().any(|waiter| waiter.is_alive(now));
                if others_wait || lease.tokens == 0 || lease.mode != Mode::Exclusive {
                    RenewOutcome::Held { others_wait }
                } else {
                    lock.extend(minting, lease)
                }
            }
            None => RenewOutcome::Lost,
        };
        lock.settle(minting, &lease.key, out);
        self.drop_if_empty(lease);
        answer
    }

    /// Answers [`Request::Release`](crate::backend::Request::Release).
    pub fn release(
        &mut self,
        now: Moment,
        lease: &Claim,
        how: Release,
        out: &mut Vec<SentNotice>,
    ) -> ReleaseOutcome {
        let minting = self.minting(now);
        let planted = self.planted;
        let Some(lock) = self.space(lease.mode).get_mut(&lease.key) else {
            return ReleaseOutcome::AlreadyLost;
        };
        lock.expire(now);
        if planted.is(Bug::ReleaseWithoutOwnerCheck) && !lock.holders.is_empty() {
            lock.holders.remove(0);
        }
        let answer = match lock.holders.iter().any(|held| held.owner == lease.owner) {
            true => ReleaseOutcome::Released,
            false => ReleaseOutcome::AlreadyLost,
        };
        match (lock.held(lease.owner), how) {
            (Some(held), Release::After(stay)) => {
                held.parked = Some(Parked::Released);
                held.expires = now + stay;
                lock.count_soonest();
            }
            _ => lock.remove(lease.owner),
        }
        lock.settle(minting, &lease.key, out);
        self.drop_if_empty(lease);
        answer
    }

    fn space(&mut self, mode: Mode) -> &mut Map<Key, Lock> {
        if mode.is_permits() { &mut self.semaphores } else { &mut self.locks }
    }

    fn minting(&self, now: Moment) -> Minting {
        Minting { now, micros: self.epoch_micros + now.as_micros(), planted: self.planted }
    }

    /// Drops the key that was empty before this one: the latest is kept, since it
    /// is often wanted again at once.
    fn drop_if_empty(&mut self, lease: &Claim) {
        if !self.space(lease.mode).get(&lease.key).is_some_and(Lock::is_empty) {
            return;
        }
        let permits = lease.mode.is_permits();
        if self.empty.as_ref().is_some_and(|(space, key)| *space == permits && *key == lease.key) {
            return;
        }
        let before = self.empty.replace((permits, lease.key.clone()));
        let Some((permits, key)) = before else { return };
        let space = if permits { &mut self.semaphores } else { &mut self.locks };
        if space.get(&key).is_some_and(Lock::is_empty)
            && let Some(lock) = space.remove(&key)
        {
            self.floor = self.floor.max(lock.last);
        }
    }

    /// Throws out what nobody touched since it ended, whenever the number of
    /// keys has doubled: a constant cost per key.
    fn sweep(&mut self, now: Moment) {
        if self.keys() <= 2 * self.swept + 1024 {
            return;
        }
        let floor = &mut self.floor;
        for space in [&mut self.locks, &mut self.semaphores] {
            space.retain(|_, lock| {
                let keep = lock.in_use(now);
                if !keep {
                    *floor = (*floor).max(lock.last);
                }
                keep
            });
        }
        self.swept = self.keys();
    }
}

/// What a new token depends on.
#[derive(Clone, Copy)]
struct Minting {
    now: Moment,
    micros: u64,
    planted: PlantedBug,
}

impl Lock {
    fn new(floor: u64) -> Self {
        Lock {
            holders: SmallVec::new(),
            waiters: LazyQueue::default(),
            last: floor,
            soonest: Moment::NEVER,
        }
    }

    fn is_empty(&self) -> bool {
        self.holders.is_empty() && self.waiters.is_empty()
    }

    fn in_use(&self, now: Moment) -> bool {
        self.holders.iter().any(|held| held.expires > now)
            || self.waiters.iter().any(|waiter| waiter.is_alive(now))
    }

    /// What this owner holds; what it has parked is no longer its own.
    fn held(&mut self, owner: Owner) -> Option<&mut Held> {
        self.holders.iter_mut().find(|held| held.owner == owner && held.parked.is_none())
    }

    fn remove(&mut self, owner: Owner) {
        self.holders.retain(|held| held.owner != owner || held.parked.is_some());
        self.waiters.retain(|waiter| waiter.owner != owner);
        self.count_soonest();
    }

    fn count_soonest(&mut self) {
        self.soonest = self.holders.iter().map(|held| held.expires).min().unwrap_or(Moment::NEVER);
    }

    fn expire(&mut self, now: Moment) {
        if self.soonest <= now {
            self.holders.retain(|held| held.expires > now);
            self.count_soonest();
        }
    }

    fn fits(&self, mode: Mode, minting: Minting) -> bool {
        match mode {
            Mode::Exclusive if minting.planted.is(Bug::ReadersAdmitWriter) => {
                self.holders.iter().all(|held| held.mode == Mode::Shared)
            }
            Mode::Exclusive => self.holders.is_empty(),
            Mode::Shared => self.holders.iter().all(|held| held.mode == Mode::Shared),
            Mode::Permits { count, of } => {
                let taken: u64 = self.holders.iter().map(|held| held.taken()).sum();
                taken + u64::from(count) <= u64::from(of)
            }
        }
    }

    /// Hands the lock to the waiters whose turn it is.
    fn settle(&mut self, minting: Minting, key: &Key, out: &mut Vec<SentNotice>) {
        let now = minting.now;
        while let Some(first) = self.waiters.front() {
            if !first.is_alive(now) && !minting.planted.is(Bug::DeadWaitersStay) {
                self.waiters.pop_front();
                continue;
            }
            if !self.fits(first.mode, minting) {
                return;
            }
            let Some(first) = self.waiters.pop_front() else { return };
            let grant = self.mint(minting, first.mode, first.tokens);
            let mut expires = first.asked + first.queue_ttl;
            if minting.planted.is(Bug::DeadWaitersStay) {
                expires = expires.max(now + first.queue_ttl);
            }
            out.push(SentNotice {
                client: first.holder.client,
                key: key.clone(),
                owner: first.owner,
                notice: Notice::Granted { grant, sent: first.sent },
            });
            self.add(Held {
                owner: first.owner,
                mode: first.mode,
                grant,
                since: now,
                expires,
                parked: None,
                holder: first.holder,
            });
        }
    }

    fn hold(&mut self, minting: Minting, claim: &Claim, expires: Moment) -> Grant {
        let grant = self.mint(minting, claim.mode, claim.tokens);
        self.add(Held {
            owner: claim.owner,
            mode: claim.mode,
            grant,
            since: minting.now,
            expires,
            parked: None,
            holder: claim.holder.clone(),
        });
        grant
    }

    fn add(&mut self, held: Held) {
        // What the same owner parked before is nobody's from now on.
        for parked in self.holders.iter_mut().filter(|other| other.owner == held.owner) {
            parked.owner = Owner::from_bits(0);
        }
        self.soonest = self.soonest.min(held.expires);
        self.holders.push(held);
    }

    /// New tokens for an exclusive holder.
    fn extend(&mut self, minting: Minting, lease: &Claim) -> RenewOutcome {
        let is_exclusive = self.held(lease.owner).is_some_and(|held| held.mode == Mode::Exclusive);
        if !is_exclusive {
            return RenewOutcome::Held { others_wait: false };
        }
        let grant = self.mint(minting, lease.mode, lease.tokens);
        if let Some(held) = self.held(lease.owner) {
            held.grant = grant;
        }
        RenewOutcome::Extended(grant)
    }

    fn mint(&mut self, minting: Minting, mode: Mode, count: u32) -> Grant {
        if mode.is_permits() {
            return Grant { first: 0, count: 0 };
        }
        let count = count.max(1);
        let start = if minting.planted.is(Bug::TokensRestart) { 0 } else { minting.micros };
        let first = self.last.max(start) + 1;
        self.last = first + u64::from(count) - 1;
        Grant { first, count }
    }
}

impl Held {
    fn taken(&self) -> u64 {
        match self.mode {
            Mode::Permits { count, .. } => u64::from(count),
            _ => 0,
        }
    }
}
