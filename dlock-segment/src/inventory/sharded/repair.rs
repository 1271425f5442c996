//! Homes that are gone: made again, or the rest removed.
//!
//! A home that was lost is made again *without units*. What it had sold and what it had left is
//! not known here: the orders say the first, and the shop knows how many units there are in all.
//!
//! What the other homes have sent to it and received from it is known, and must be counted by
//! the new home as it was: what was sent would else be received once more, and what was received
//! would be taken out of it once more. Both are counted in one batch that leaves nothing
//! available at any moment:
//! ```text
//! restocked + all received = all sent + written off
//! ```
//! So the sale lost exactly the units that the home had, and the books of all homes add up.

use dlock::{Dlock, Key};

use super::ShardedInventory;
use super::create::complete;
use super::open::{Found, LOOKED_FOR, missing_homes};
use crate::error::{Error, Result};
use crate::homes::{Directory, Homes, Seen, Site, newest_settings, out_of_reach};
use crate::store::{Answer, Change, Id, Request, Terms, View};

/// The id of the write-off of units that were sent to a home before it was lost. Ids of users
/// contain no control characters.
const LOST_UNITS: &str = "\u{1}repair";

impl ShardedInventory {
    /// Makes the homes again that are not there, and returns which.
    pub(in super::super) async fn repair(clients: &[Dlock], key: &Key) -> Result<Vec<u32>> {
        let directory = match Found::by_name(clients, key, LOOKED_FOR, 0).await? {
            Found::Directory(directory) => directory,
            Found::One => return Ok(Vec::new()),
            Found::None => {
                return Err(Error::NotFound(format!(
                    "nothing is left of the inventory `{}`; if it was there, create it again with the whole stock and reconcile it with your orders",
                    key.label()
                )));
            }
        };
        // Nobody changes the settings, or repairs it, at the same time.
        let lock = clients[0].mutex(key.part("settings")?);
        let guard = lock.lock().await.map_err(Error::from)?;
        let repaired = guard.run(Self::make_again(clients, key, &directory)).await;
        repaired.map_err(Error::from)?
    }

    async fn make_again(clients: &[Dlock], key: &Key, directory: &Directory) -> Result<Vec<u32>> {
        let (mut sites, empty) = Self::sites_and_empty_servers(clients, key, directory).await?;
        let found = missing_homes(&sites).await?;
        // One that is there may be left of a repair that was interrupted.
        let is_untouched = |view: &View| !view.is_complete && view.initial + view.changes == 0;
        let lost = found.views.iter().enumerate().filter(|(home, view)| {
            found.missing.contains(home) || view.as_ref().is_ok_and(is_untouched)
        });
        let lost: Vec<usize> = lost.map(|(home, _)| home).collect();
        let away = found.views.iter().enumerate();
        let away = away.filter(|(home, view)| view.is_err() && !found.missing.contains(home));
        let away: Vec<u32> = away.map(|(home, _)| home as u32).collect();
        if !away.is_empty() {
            return Err(Error::OutOfReach { homes: away });
        }
        if !found.any_complete {
            return Err(Error::NotFound(format!(
                "the creation of `{}` was interrupted; create it again with the same terms",
                key.label()
            )));
        }
        for place in empty {
            let server = directory.homes[place].1.clone();
            let given =
                sites[place].call(|store, _| async move { store.identity(Some(&server)).await });
            given.await?;
        }
        if lost.is_empty() {
            return Ok(Vec::new());
        }
        let mut others = found.views.iter().flatten().filter(|view| view.is_complete);
        let Some(terms) = others.next().map(|other| terms_of(other, directory)) else {
            return Err(Error::Unknown(None));
        };
        let mut views = Vec::new();
        for &home in &lost {
            let wanted = terms.clone();
            let made =
                sites[home].call(|store, id| async move { store.create(&id.key, &wanted).await });
            views.push(made.await?);
        }
        for (site, view) in sites.iter_mut().zip(&found.views) {
            site.id.birth = view.as_ref().map_or(0, |view| view.birth);
        }
        let homes = Homes::new(sites);
        let collected = homes.collect().await;
        let settings = newest_settings(&collected);
        if let Some(error) = out_of_reach(&collected) {
            return Err(error);
        }
        let seen: Vec<Seen> = collected.into_iter().collect::<Result<_>>()?;
        for &home in &lost {
            count_moves(&homes.sites[home], home, &seen).await?;
            if let Some(settings) = settings.filter(|settings| settings.version > 0) {
                homes.sites[home].change(Change::Settings(settings)).await?;
            }
        }
        let made: Vec<Site> = lost.iter().map(|&home| homes.sites[home].clone()).collect();
        complete(&made, &views).await?;
        Ok(lost.into_iter().map(|home| home as u32).collect())
    }

    /// Removes what is there of the inventory of this name, also if some of its homes are gone.
    pub(in super::super) async fn remove_by_name(clients: &[Dlock], key: &Key) -> Result<bool> {
        match Found::by_name(clients, key, LOOKED_FOR, 0).await? {
            Found::Directory(directory) => {
                let sites = Self::sites_and_empty_servers(clients, key, &directory).await?.0;
                remove(&sites).await
            }
            Found::One => {
                let id = crate::store::InventoryId { key: key.clone(), birth: 0 };
                remove(&[super::site(&clients[0], id)?]).await
            }
            Found::None => Ok(false),
        }
    }
}

/// The terms of a home that is made again like another one of the sale: without units.
fn terms_of(other: &View, directory: &Directory) -> Terms {
    Terms {
        stock: 0,
        segments: other.segments,
        per_buyer: other.per_buyer,
        opens_at: other.opens_at,
        closes_at: other.closes_at,
        retention: other.numbering.retention,
        journal: other.journal,
        directory: directory.to_text(),
    }
}

/// Lets a home that was made again count what the others have sent to it and received from it.
async fn count_moves(site: &Site, home: usize, seen: &[Seen]) -> Result<()> {
    let mine = &seen[home];
    let others = seen.iter().enumerate().filter(|(other, _)| *other != home);
    let (mut batch, mut sends) = (Vec::new(), Vec::new());
    let (mut comes, mut goes) = (0, 0);
    for (other, its) in others.clone() {
        let (total, here) = (its.sent[home], mine.received[other].0);
        let (received, sent) = (its.received[home].0, mine.sent[other]);
        if total > here {
            comes += total - here;
            let (from, seen) = (other as u32, its.view.changes);
            batch.push(Request::Receive { from, total, seen });
        }
        if received > sent {
            goes += received - sent;
            let (to, quantity) = (other as u32, received - sent);
            sends.push(Request::Send { to, quantity, after: sent });
        }
    }
    if goes > comes {
        batch.insert(0, Request::Restock { quantity: goes - comes, operation: None });
    }
    batch.append(&mut sends);
    if comes > goes {
        let operation: Id = LOST_UNITS.into();
        batch.push(Request::WriteOff { quantity: comes - goes, operation });
    }
    if !batch.is_empty() {
        let (_, answers) = site.apply(batch).await?;
        let refused = answers
            .iter()
            .find(|answer| !matches!(answer, Answer::Found(_) | Answer::Moved { .. }));
        if let Some(refused) = refused {
            return Err(Error::Conflict(format!("the store answered {refused:?}")));
        }
    }
    let known = others.map(|(_, its)| its.received[home].1).max().unwrap_or(0);
    site.change(Change::CountFrom(known)).await.map(drop)
}

/// Removes homes, the first one last: it has the name of the sale.
pub(super) async fn remove(sites: &[Site]) -> Result<bool> {
    let mut any = false;
    for site in sites.iter().rev() {
        let removed = site.call(|store, mut id| async move {
            if id.birth == 0 {
                id.birth = match store.open(&id).await {
                    Ok(view) => view.birth, // so that whoever has it is told that it was removed
                    Err(Error::NotFound(_)) => return Ok(false),
                    Err(error) => return Err(error),
                };
            }
            store.remove(&id).await
        });
        any |= removed.await?;
    }
    Ok(any)
}
