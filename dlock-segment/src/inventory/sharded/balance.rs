//! The balancer: now and then one process levels the homes, before one of them runs dry.
//!
//! Every process that sells tries it about once a second, and the one that gets the lock
//! looks at all homes. Two looks tell at what rate each home sells.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Inventory, ShardedInventory};
use crate::homes::Seen;

/// The time between two looks of one process.
const EVERY: Duration = Duration::from_secs(1);

pub(in super::super) struct Balancer {
    began: Instant,
    /// When the next look is due, in milliseconds since it began.
    due: AtomicU64,
    is_busy: AtomicBool,
    /// What left each home by the last look, and when that was.
    last: Mutex<Option<(Instant, Vec<u64>)>>,
    rates: Mutex<Vec<f64>>,
    moves: AtomicU64,
}

impl Balancer {
    pub(super) fn new(homes: usize) -> Self {
        Balancer {
            began: Instant::now(),
            due: AtomicU64::new(EVERY.as_millis() as u64),
            is_busy: AtomicBool::new(false),
            last: Mutex::new(None),
            rates: Mutex::new(vec![0.0; homes]),
            moves: AtomicU64::new(0),
        }
    }

    /// How many moves this process has made.
    pub(in super::super) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    pub(super) fn count_moves(&self, moves: usize) {
        self.moves.fetch_add(moves as u64, Ordering::Relaxed);
    }

    /// Starts a look in the background, if it is time for one.
    pub(super) fn look_after(&self, sharded: &Arc<ShardedInventory>, sale: &Inventory) {
        let now = self.began.elapsed().as_millis() as u64;
        if now < self.due.load(Ordering::Relaxed) {
            return;
        }
        if !sale.dlock.capabilities().remote {
            self.due.store(u64::MAX, Ordering::Relaxed); // there, a home that is dry is enough
            return;
        }
        let Ok(key) = sale.name().part("balancer") else { return };
        if self.is_busy.swap(true, Ordering::AcqRel) {
            return;
        }
        self.due.store(now + EVERY.as_millis() as u64, Ordering::Relaxed);
        let (sharded, dlock) = (sharded.clone(), sale.dlock.clone());
        let job = async move {
            if let Ok(Some(guard)) = dlock.mutex(key).try_lock().await {
                let _ = guard.run(sharded.balance(false)).await;
            }
            sharded.balancer.is_busy.store(false, Ordering::Release);
        };
        tokio::spawn(job);
    }

    /// The rates at which homes sell, by what left each of them since the last look.
    fn update_rates(&self, seen: &[crate::error::Result<Seen>]) -> Vec<f64> {
        let left = seen.iter().map(|seen| {
            let view = seen.as_ref().ok().map(|seen| &seen.view);
            view.map_or(0, |view| (view.initial + view.inflow).saturating_sub(view.available))
        });
        let left: Vec<u64> = left.collect();
        let now = Instant::now();
        let mut rates = self.rates.lock();
        if let Some((at, before)) = &*self.last.lock() {
            let seconds = (now - *at).as_secs_f64().max(0.001);
            for (rate, (now, before)) in rates.iter_mut().zip(left.iter().zip(before)) {
                *rate = (*rate + now.saturating_sub(*before) as f64 / seconds) / 2.0;
            }
        }
        *self.last.lock() = Some((now, left));
        rates.clone()
    }
}

impl ShardedInventory {
    /// Levels the homes by the rates at which they sell; with `always`, evenly.
    pub(in super::super) async fn balance(&self, always: bool) -> crate::Result<()> {
        let seen = self.homes.collect().await;
        let mut rates = self.balancer.update_rates(&seen);
        if always {
            rates.fill(0.0);
        }
        let moves = self.homes.level(&rates, always).await?;
        self.balancer.count_moves(moves);
        Ok(())
    }
}
