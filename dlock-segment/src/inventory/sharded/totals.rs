//! What concerns all homes: the counts, the journal, the settings, the audit.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::join_all;

use super::{Inventory, ShardedInventory, repair};
use crate::error::{Error, Result};
use crate::homes::{Routing, Seen, compare_homes, newest_settings, out_of_reach, whole};
use crate::inventory::audit::{self, Audit, Disagreement};
use crate::inventory::{JournalCursor, Stock};
use crate::store::{Change, Counts, Durability, JournalEntry, Snapshot, View};

/// How often the homes are looked at while units are received.
const TRIES: usize = 4;

impl ShardedInventory {
    /// The views of all homes.
    ///
    /// # Errors
    /// If one cannot be reached.
    async fn views(&self) -> Result<Vec<View>> {
        let mut last = Vec::new();
        for _ in 0..TRIES {
            let seen = self.homes.collect().await;
            let views: Result<Vec<View>> = seen.into_iter().map(|seen| Ok(seen?.view)).collect();
            last = views?;
            // The homes are not looked at in one moment: what was received after the sender
            // was looked at is counted twice.
            let sum = whole(&last);
            if sum.sent >= sum.received {
                break;
            }
        }
        Ok(last)
    }

    pub(in super::super) async fn stock(&self, sale: &Inventory) -> Result<Stock> {
        let sum = whole(&self.views().await?);
        sale.saw_units(Snapshot::from(&sum));
        Ok(self.as_stock(&sum))
    }

    fn as_stock(&self, sum: &View) -> Stock {
        let in_transit = sum.sent.saturating_sub(sum.received);
        Stock { homes: self.count() as u32, in_transit, ..sum.clone().into() }
    }

    pub(in super::super) async fn segments(&self) -> Result<(Stock, Vec<Counts>)> {
        let read = self
            .homes
            .sites
            .iter()
            .map(|site| site.call(|store, id| async move { store.counts(&id).await }));
        let (mut views, mut counts) = (Vec::new(), Vec::new());
        for read in join_all(read).await {
            let (view, of_home) = read?;
            views.push(view);
            counts.extend(of_home);
        }
        Ok((self.as_stock(&whole(&views)), counts))
    }

    /// Entries of each home after its place in the cursor.
    pub(in super::super) async fn journal(
        &self,
        after: &JournalCursor,
        limit: usize,
    ) -> Result<Vec<JournalEntry>> {
        let mut entries = Vec::new();
        for (home, site) in (0..).zip(&self.homes.sites) {
            let after = after.sequence(home);
            let read = site.call(move |store, id| async move {
                let entries = store.journal(&id, after, limit).await?;
                if entries.is_empty() && store.view(&id).await?.journal == 0 {
                    return Err(crate::inventory::no_journal());
                }
                Ok(entries)
            });
            entries.extend(read.await?.into_iter().map(|entry| JournalEntry { home, ..entry }));
        }
        Ok(entries)
    }

    /// Changes all homes. What they share is versioned by the token of a lock; a home that is
    /// away gets it from whoever looks next.
    pub(in super::super) async fn change(
        self: &Arc<Self>,
        sale: &Inventory,
        change: Change,
    ) -> Result<Stock> {
        if self.directory.routing == Routing::Operation
            && matches!(change, Change::PerBuyer(limit) if limit > 0)
        {
            return Err(limit_needs_buyers());
        }
        match change {
            Change::Resize(_) | Change::Rebalance => {
                if change == Change::Rebalance {
                    self.balance(true).await?;
                }
                for site in &self.homes.sites {
                    site.change(change).await?;
                }
            }
            _ => self.change_settings(sale, change).await?,
        }
        self.stock(sale).await
    }

    async fn change_settings(&self, sale: &Inventory, change: Change) -> Result<()> {
        let lock = sale.dlock.mutex(sale.name().part("settings")?);
        let guard = lock.lock().await.map_err(Error::from)?;
        let collected = self.homes.collect().await;
        let Some(mut settings) = newest_settings(&collected) else {
            return Err(out_of_reach(&collected).unwrap_or(Error::Unknown(None)));
        };
        settings.version = guard.token().get().max(settings.version + 1);
        match change {
            Change::Window { opens_at, closes_at } => {
                (settings.opens_at, settings.closes_at) = (opens_at, closes_at);
            }
            Change::Pause => settings.paused = true,
            Change::Resume => settings.paused = false,
            Change::PerBuyer(limit) => settings.per_buyer = limit,
            Change::Retention(retention) => settings.retention = retention,
            _ => {}
        }
        let sites = self.homes.sites.iter();
        let changed = join_all(sites.map(|site| site.change(Change::Settings(settings)))).await;
        out_of_reach(&changed).map_or(Ok(()), Err)
    }

    /// Removes all homes.
    pub(in super::super) async fn remove(&self) -> Result<bool> {
        repair::remove(&self.homes.sites).await
    }

    /// What the server would keep that keeps least.
    pub(in super::super) async fn durability(&self) -> Result<Durability> {
        let rank =
            |durability: &Durability| match (durability.append_only, durability.fsync.as_deref()) {
                (None, _) => 0,
                (Some(false), _) => 1,
                (Some(true), Some("always")) => 4,
                (Some(true), Some("everysec")) => 3,
                (Some(true), _) => 2,
            };
        let mut least: Option<Durability> = None;
        for site in &self.homes.sites {
            let here = site.call(|store, _| async move { store.durability().await }).await?;
            if least.as_ref().is_none_or(|least| rank(&here) < rank(least)) {
                least = Some(here);
            }
        }
        Ok(least.unwrap_or_default())
    }

    /// Audits each home, and then what holds between them.
    pub(in super::super) async fn audit(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<Audit> {
        let mut whole_audit = Audit { exact: true, ..Audit::default() };
        let audits = self.homes.sites.iter().map(|site| audit::of(site, progress));
        for (home, audit) in join_all(audits).await.into_iter().enumerate() {
            whole_audit.add(home, audit?);
        }
        let latest = self.handles.iter().map(|home| home.latest.load(Ordering::SeqCst));
        let latest: Vec<u64> = latest.collect();
        let receivers = self.all_seen().await?; // before the senders
        let senders = self.all_seen().await?;
        let comparison = compare_homes(&receivers, &senders, &latest);
        whole_audit.in_transit = comparison.in_transit;
        whole_audit.lost_sends = comparison.lost_sends;
        let losses = comparison.losses.into_iter();
        whole_audit.disagreements.extend(losses.map(|what| Disagreement { operation: None, what }));
        Ok(whole_audit)
    }

    /// The view of each home.
    pub(in super::super) async fn all_views(&self) -> Result<Vec<View>> {
        self.views().await
    }

    async fn all_seen(&self) -> Result<Vec<Seen>> {
        self.homes.collect().await.into_iter().collect()
    }
}

pub(in super::super) fn limit_needs_buyers() -> Error {
    Error::Invalid(
        "a limit for each buyer needs an inventory that is routed by buyer, because all orders of a buyer must be in one home; create it with .routed_by(Routing::Buyer)"
            .into(),
    )
}
