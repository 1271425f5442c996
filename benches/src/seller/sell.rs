//! How one order is sold, by each method.

use std::sync::atomic::Ordering;

use anyhow::{Result, bail};
use dlock_segment::{
    Confirmation, Deduction, Inventory, LeasedDeduction, Reservation, SegmentedLock,
};

use super::{Seller, Strategy};
use crate::clock;
use crate::lock_client::release_guard;
use crate::naive_stock::NaiveStock;

impl Seller {
    /// Sells up to `want` units to one order and returns how many; 0 if the stock is
    /// sold out, `None` if the lock was not acquired before `end`. The futures of the other
    /// strategies are on the heap: they are larger, and would be moved with that of the
    /// inventory.
    ///
    /// # Errors
    /// Fails if the store fails.
    pub async fn sell(&self, order: &str, want: u64, end: u64) -> Result<Option<u64>> {
        if self.sold_out.load(Ordering::Relaxed) {
            return Ok(Some(0));
        }
        let sold = match &self.strategy {
            Strategy::Global(lock, stock) => {
                let Some(guard) = clock::timeout_at(end, lock.lock()).await else {
                    return Ok(None);
                };
                let guard = guard?;
                let sold = Box::pin(stock.take(0, want, self.config.think)).await?;
                release_guard(guard).await?;
                sold
            }
            Strategy::Segmented(lock, stock) => {
                match Box::pin(self.sell_from_segments(lock, stock, want, end)).await? {
                    Some(sold) => sold,
                    None => return Ok(None),
                }
            }
            Strategy::Inventory { inventory, idempotent } => {
                self.sell_from_inventory(inventory, *idempotent, order, want).await?
            }
            Strategy::Leased { units, .. } => match units.deduct_or_wait(want).await {
                LeasedDeduction::Taken => want,
                LeasedDeduction::SoldOut | LeasedDeduction::NotEnough { .. } => 0,
                other => bail!("unexpected answer of the leased units: {other:?}"),
            },
            Strategy::Row(row) => {
                if Box::pin(row.deduct(0, want)).await? {
                    want
                } else {
                    0
                }
            }
            Strategy::BatchedRow(batched) => {
                if Box::pin(batched.deduct(want)).await? {
                    want
                } else {
                    0
                }
            }
        };
        if sold == 0 && !matches!(self.strategy, Strategy::Segmented(..)) {
            self.sold_out.store(true, Ordering::Relaxed);
        }
        Ok(Some(sold))
    }

    /// Takes units from one segment after the other until the order is complete.
    async fn sell_from_segments(
        &self,
        lock: &SegmentedLock,
        stock: &NaiveStock,
        want: u64,
        end: u64,
    ) -> Result<Option<u64>> {
        let mut sold = 0;
        let mut segments = lock.pick();
        loop {
            let Some(next) = clock::timeout_at(end, segments.next()).await else {
                return Ok(Some(sold).filter(|sold| *sold > 0));
            };
            let Some((segment, guard)) = next? else { break };
            sold += stock.take(segment.index(), want - sold, self.config.think).await?;
            release_guard(guard).await?;
            if sold == want {
                break;
            }
            segments.dry();
        }
        Ok(Some(sold))
    }

    /// If there are fewer units than wanted, the order takes fewer.
    async fn sell_from_inventory(
        &self,
        inventory: &Inventory,
        idempotent: bool,
        order: &str,
        want: u64,
    ) -> Result<u64> {
        for units in (1..=want).rev() {
            let id = format!("{order}-{units}");
            let sold = match (idempotent, self.config.reserve_first) {
                (false, _) => taken(inventory.deduct(units).send().await?)?,
                (true, false) => {
                    taken(inventory.deduct(units).operation(id).first_try().send().await?)?
                }
                (true, true) => {
                    let reserving = inventory.reserve(units).operation(id.clone()).first_try();
                    match reserving.send().await? {
                        Reservation::Held(_) => {
                            self.think().await;
                            return match inventory.reservation(&id).confirm().await? {
                                Confirmation::Confirmed(_) => Ok(units),
                                other => bail!("a reservation is {other:?} instead of confirmed"),
                            };
                        }
                        Reservation::SoldOut { .. } | Reservation::NotEnough { .. } => false,
                        other => bail!("unexpected answer of the inventory: {other:?}"),
                    }
                }
            };
            if sold {
                self.think().await;
                return Ok(units);
            }
        }
        Ok(0)
    }

    async fn think(&self) {
        if !self.config.think.is_zero() {
            tokio::time::sleep(self.config.think).await;
        }
    }
}

fn taken(deduction: Deduction) -> Result<bool> {
    match deduction {
        Deduction::Taken(_) => Ok(true),
        Deduction::SoldOut { .. } | Deduction::NotEnough { .. } => Ok(false),
        other => bail!("unexpected answer of the inventory: {other:?}"),
    }
}
