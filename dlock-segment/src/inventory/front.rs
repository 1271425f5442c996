//! What stands in front of the store: a flag that says "sold out" without a round
//! trip, and a limit of requests for the process.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use governor::clock::{Clock as _, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::outcome::SoldOut;
use crate::error::{Error, Result};
use crate::store::{Answer, Glance};

/// What is longer is as good as for ever, and no clock can count it.
const AT_MOST: Duration = Duration::from_secs(365 * 24 * 60 * 60);

#[derive(Default)]
pub(crate) struct Front {
    raised: AtomicBool,
    /// The latest change of the sale that an answer knew of: answers may overtake
    /// each other, and an older "sold out" tells nothing. A server that lost data
    /// counts from lower on; then every request asks until it has caught up.
    latest: AtomicU64,
    flag: Mutex<Option<Flag>>,
    limited: AtomicBool,
    limiter: Mutex<Option<Arc<DefaultDirectRateLimiter>>>,
}

/// The last "sold out".
#[derive(Clone, Copy)]
struct Flag {
    available: u64,
    until: Instant,
    said: SoldOut,
    at: Instant,
}

impl Front {
    pub(crate) fn limit(&self, per_second: NonZeroU32) {
        *self.limiter.lock() = Some(Arc::new(RateLimiter::direct(Quota::per_second(per_second))));
        self.limited.store(true, Ordering::Release);
    }

    /// Lets a request through, or says when it may come again.
    pub(crate) fn admit(&self) -> Result<()> {
        if !self.limited.load(Ordering::Acquire) {
            return Ok(());
        }
        let Some(limiter) = self.limiter.lock().clone() else { return Ok(()) };
        limiter.check().map_err(|not_until| Error::Throttled {
            retry_after: not_until.wait_time_from(DefaultClock::default().now()),
        })
    }

    /// What a request for so many units would hear, if that is known.
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

    /// Learns from an answer. The flag lasts for `age` at most, and not beyond
    /// the next expiry.
    pub(crate) fn learn(&self, glance: &Glance, answer: &Answer, age: Duration) {
        if glance.changes > self.latest.load(Ordering::SeqCst) {
            self.latest.fetch_max(glance.changes, Ordering::SeqCst);
        }
        if *answer == Answer::SoldOut && !age.is_zero() {
            let said = SoldOut::of(glance);
            let now = Instant::now();
            let lasts = said.next_expiry.map_or(age, |left| left.min(age)).min(AT_MOST);
            let available = glance.available;
            let mut flag = self.flag.lock();
            // First: who knows of a later change sees it raised, or is seen here.
            self.raised.store(true, Ordering::SeqCst);
            if glance.changes >= self.latest.load(Ordering::SeqCst) {
                *flag = Some(Flag { available, until: now + lasts, said, at: now });
            } else {
                self.raised.store(flag.is_some(), Ordering::SeqCst);
            }
        } else if self.raised.load(Ordering::SeqCst) {
            let mut flag = self.flag.lock();
            if flag.is_some_and(|flag| glance.available > flag.available) {
                *flag = None;
                self.raised.store(false, Ordering::Release);
            }
        }
    }
}
