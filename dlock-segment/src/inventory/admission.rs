//! What is decided without the store: a cached "sold out" that needs no round trip, and
//! the rate limit of this process.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dlock::Key;
use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::outcome::SoldOut;
use crate::error::{Error, Result};
use crate::store::{Answer, Snapshot};

/// The longest time that "sold out" is cached: clocks cannot count for ever.
const AT_MOST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

#[derive(Default)]
pub(crate) struct Admission {
    raised: AtomicBool,
    /// The latest change that an answer has seen. Answers may overtake each other, and an
    /// older "sold out" is ignored. A server that lost data counts from a lower number;
    /// then every request is sent until the count has caught up.
    latest: AtomicU64,
    flag: Mutex<Option<Flag>>,
    limited: AtomicBool,
    limiter: Mutex<Option<Arc<DefaultDirectRateLimiter>>>,
}

/// The rate limits of a client, by inventory. They outlive the handles: a service that
/// opens the inventory for each request still has one limit.
#[derive(Default)]
pub(crate) struct Limiters(Mutex<HashMap<Key, Limiter>>);

type Limiter = (NonZeroU32, Arc<DefaultDirectRateLimiter>);

/// From this number on, limits that no handle uses are forgotten.
const MAX_UNUSED_LIMITERS: usize = 1_024;

impl Limiters {
    /// The limiter of an inventory. The same rate again does not fill its bucket.
    pub(crate) fn of(&self, key: &Key, rate: NonZeroU32) -> Arc<DefaultDirectRateLimiter> {
        let mut all = self.0.lock();
        if let Some((known, limiter)) = all.get(key)
            && *known == rate
        {
            return limiter.clone();
        }
        if all.len() >= MAX_UNUSED_LIMITERS {
            all.retain(|_, (_, limiter)| Arc::strong_count(limiter) > 1);
        }
        let limiter = Arc::new(RateLimiter::direct(Quota::per_second(rate)));
        all.insert(key.clone(), (rate, limiter.clone()));
        limiter
    }
}

/// The last "sold out" answer.
#[derive(Clone, Copy)]
struct Flag {
    available: u64,
    until: Instant,
    said: SoldOut,
    at: Instant,
}

impl Admission {
    pub(crate) fn limit(&self, limiter: Arc<DefaultDirectRateLimiter>) {
        *self.limiter.lock() = Some(limiter);
        self.limited.store(true, Ordering::Release);
    }

    /// Lets a request through, or says when to try again.
    pub(crate) fn admit(&self) -> Result<()> {
        if !self.limited.load(Ordering::Acquire) {
            return Ok(());
        }
        let Some(limiter) = self.limiter.lock().clone() else { return Ok(()) };
        limiter.check().map_err(|not_until| Error::Throttled {
            retry_after: not_until.wait_time_from(DefaultClock::default().now()),
        })
    }

    /// The cached answer to a request for this quantity, if there is one.
    pub(crate) fn sold_out(&self, quantity: u64) -> Option<SoldOut> {
        if !self.raised.load(Ordering::Acquire) {
            return None;
        }
        let mut flag = self.flag.lock();
        let Flag { available, until, mut said, at } = (*flag)?;
        let now = Instant::now();
        if now >= until {
            *flag = None;
            self.raised.store(false, Ordering::Release);
            return None;
        }
        said.next_expiry = said.next_expiry.map(|left| left.saturating_sub(now - at));
        (quantity > available).then_some(said)
    }

    /// Updates the cache from an answer. "Sold out" is cached for `age` at most, and only
    /// until the next reservation expires.
    pub(crate) fn update(&self, snapshot: &Snapshot, answer: &Answer, age: Duration) {
        if snapshot.changes > self.latest.load(Ordering::SeqCst) {
            self.latest.fetch_max(snapshot.changes, Ordering::SeqCst);
        }
        if matches!(answer, Answer::SoldOut { .. }) && !age.is_zero() {
            let said = SoldOut::of(snapshot.available, snapshot);
            let now = Instant::now();
            let lasts = said.next_expiry.map_or(age, |left| left.min(age)).min(AT_MOST);
            let available = snapshot.available;
            let mut flag = self.flag.lock();
            // This comes first: a thread that knows of a later change either sees the flag
            // raised, or its change is seen here.
            self.raised.store(true, Ordering::SeqCst);
            if snapshot.changes >= self.latest.load(Ordering::SeqCst) {
                *flag = Some(Flag { available, until: now + lasts, said, at: now });
            } else {
                self.raised.store(flag.is_some(), Ordering::SeqCst);
            }
        } else if self.raised.load(Ordering::SeqCst) {
            let mut flag = self.flag.lock();
            if flag.is_some_and(|flag| snapshot.available > flag.available) {
                *flag = None;
                self.raised.store(false, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AGE: Duration = Duration::from_secs(60);
    const SOLD_OUT: Answer = Answer::SoldOut { available: 0 };

    /// What an answer says: after this number of changes, this many units are left.
    fn snapshot(changes: u64, available: u64) -> Snapshot {
        Snapshot { now: 1_000, available, changes, ..Snapshot::default() }
    }

    fn learned(answers: &[(Snapshot, Answer)]) -> Admission {
        let admission = Admission::default();
        for (snapshot, answer) in answers {
            admission.update(snapshot, answer, AGE);
        }
        admission
    }

    #[tokio::test(start_paused = true)]
    async fn an_older_sold_out_tells_nothing() {
        let stock_is_back = (snapshot(8, 5), Answer::Absent);
        let sold_out = (snapshot(7, 0), SOLD_OUT);
        let in_order = learned(&[sold_out.clone(), stock_is_back.clone()]);
        assert!(in_order.sold_out(1).is_none(), "it falls when stock is seen");
        let crossed = learned(&[stock_is_back.clone(), sold_out.clone()]);
        assert!(crossed.sold_out(1).is_none(), "the answers crossed");
        // What came before both of them does not matter, and what comes after does.
        let crossed = learned(&[sold_out.clone(), stock_is_back.clone(), sold_out]);
        assert!(crossed.sold_out(1).is_none());
        let again = learned(&[stock_is_back, (snapshot(9, 0), SOLD_OUT)]);
        assert!(again.sold_out(1).is_some());
        // Two that nothing lies between tell the same.
        let same = learned(&[(snapshot(9, 0), Answer::LimitReached), (snapshot(9, 0), SOLD_OUT)]);
        assert!(same.sold_out(1).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_wants_less_than_there_is_still_asks() {
        let admission = learned(&[(snapshot(7, 3), Answer::SoldOut { available: 3 })]);
        assert!(admission.sold_out(3).is_none());
        assert_eq!(admission.sold_out(4).map(|said| said.available), Some(3));
        admission.update(&snapshot(8, 2), &Answer::Absent, AGE);
        assert!(admission.sold_out(4).is_some(), "less is no return of stock");
        admission.update(&snapshot(9, 4), &Answer::Absent, AGE);
        assert!(admission.sold_out(4).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn it_lasts_for_its_age_and_no_longer_than_the_next_reservation() {
        let admission = learned(&[(snapshot(7, 0), SOLD_OUT)]);
        tokio::time::advance(AGE - Duration::from_millis(1)).await;
        assert!(admission.sold_out(1).is_some());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(admission.sold_out(1).is_none());

        let reserved = Snapshot { reserved: 2, next_expiry: 3_000, ..snapshot(8, 0) };
        admission.update(&reserved, &SOLD_OUT, AGE);
        tokio::time::advance(Duration::from_millis(1_500)).await;
        let said = admission.sold_out(1).expect("reserved for now");
        assert_eq!((said.reserved, said.next_expiry), (2, Some(Duration::from_millis(500))));
        tokio::time::advance(Duration::from_millis(500)).await;
        assert!(admission.sold_out(1).is_none());

        admission.update(&snapshot(9, 0), &SOLD_OUT, Duration::ZERO);
        assert!(admission.sold_out(1).is_none(), "an age of zero: always requests");
    }
}
