//! A sale with several homes is made.
//!
//! The first home is made first: it decides which directory counts, if two create the sale at
//! once. Then the others are made, each with its share of the stock, and at last each is told
//! that all were made. So whoever finds a home that was told so knows that a home that is not
//! there is lost. If no home was told so, the creation was interrupted and goes on.

use dlock::{Dlock, Key};

use super::open::{Found, missing_homes};
use super::{ShardedInventory, names, site};
use crate::error::{Error, Result};
use crate::homes::{Directory, Routing, Site};
use crate::store::{Change, InventoryId, Terms, View};

/// The terms of a new sale with several homes.
pub(in super::super) struct NewSale {
    pub(in super::super) key: Key,
    pub(in super::super) terms: Terms,
    pub(in super::super) homes: u32,
    pub(in super::super) routing: Routing,
}

impl ShardedInventory {
    pub(in super::super) async fn create(clients: &[Dlock], sale: NewSale) -> Result<(Self, View)> {
        let NewSale { key, mut terms, homes, routing } = sale;
        let directory = match Found::by_name(clients, &key, homes as usize, 0).await? {
            Found::Directory(directory) => directory,
            Found::One => {
                return Err(Error::Conflict(format!(
                    "there is an inventory `{}` with one home; nothing was changed; open() it to use it as it is",
                    key.label()
                )));
            }
            Found::None => new_directory(clients, &key, homes as usize, routing).await?,
        };
        if directory.homes.len() != homes as usize || directory.routing != routing {
            return Err(Error::Conflict(format!(
                "there is an inventory `{}` with other terms: it has {} homes and is routed by {:?}; nothing was changed; open() it to use it as it is",
                key.label(),
                directory.homes.len(),
                directory.routing
            )));
        }
        let mut sites = Self::sites(clients, &key, &directory).await?;
        let found = missing_homes(&sites).await?;
        if found.any_complete && !found.missing.is_empty() {
            return Err(found.lost(&key));
        }
        let (stock, share) = (terms.stock, terms.stock / u64::from(homes));
        terms.directory = directory.to_text();
        let mut views = Vec::new();
        for (home, site) in (0..).zip(&mut sites) {
            // The stock of a home that is there is compared with that of all, below.
            terms.stock = match &found.views[home as usize] {
                Ok(view) => view.initial,
                Err(_) => share + u64::from(home < stock % u64::from(homes)),
            };
            let wanted = terms.clone();
            let made = site.call(|store, id| async move { store.create(&id.key, &wanted).await });
            let view = made.await.map_err(|error| other_stock(error, &found.views, stock))?;
            site.id.birth = view.birth;
            views.push(view);
        }
        if views.iter().map(|view| view.initial).sum::<u64>() != stock {
            let what = format!("there is an inventory `{}` with other terms", key.label());
            return Err(other_stock(Error::Conflict(what), &found.views, stock));
        }
        complete(&sites, &views).await?;
        let first = views.swap_remove(0);
        Ok((ShardedInventory::new(directory, sites)?, first))
    }

    /// Where the homes of a directory are, after a check that the servers are the ones with
    /// which the sale was made.
    pub(super) async fn sites(
        clients: &[Dlock],
        sale: &Key,
        directory: &Directory,
    ) -> Result<Vec<Site>> {
        let (sites, empty) = Self::sites_and_empty_servers(clients, sale, directory).await?;
        match empty.first() {
            Some(place) => Err(empty_server(*place)),
            None => Ok(sites),
        }
    }

    /// Where the homes are, and which servers do not know that they ever had one.
    pub(super) async fn sites_and_empty_servers(
        clients: &[Dlock],
        sale: &Key,
        directory: &Directory,
    ) -> Result<(Vec<Site>, Vec<usize>)> {
        let (mut sites, mut empty) = (Vec::new(), Vec::new());
        for (home, (key, server)) in directory.homes.iter().enumerate() {
            let dlock = &clients[home % clients.len()];
            let site = site(dlock, InventoryId { key: labelled(sale, key), birth: 0 })?;
            if home < clients.len() {
                let asked = site.call(|store, _| async move { store.identity(None).await });
                match asked.await {
                    Ok(Some(identity)) if identity != *server => return Err(other_servers(home)),
                    Ok(None) if server != "-" => empty.push(home),
                    // A server that is away is found out when it is back: its homes have
                    // names of their own.
                    Ok(_) | Err(_) => {}
                }
            } else if *server != directory.homes[home % clients.len()].1 {
                return Err(other_servers(home % clients.len()));
            }
            sites.push(site);
        }
        Ok((sites, empty))
    }
}

/// Adds to a conflict of terms that the stock of all homes is another.
fn other_stock(error: Error, found: &[Result<View>], stock: u64) -> Error {
    let is = found.iter().flatten().map(|view| view.initial).sum::<u64>();
    match error {
        Error::Conflict(what) if is != stock => {
            Error::Conflict(format!("{what}; stock is {is}, not {stock}"))
        }
        error => error,
    }
}

/// Tells every home that all were made.
pub(super) async fn complete(sites: &[Site], views: &[View]) -> Result<()> {
    for (site, view) in sites.iter().zip(views) {
        if !view.is_complete {
            site.change(Change::Complete).await?;
        }
    }
    Ok(())
}

async fn new_directory(
    clients: &[Dlock],
    key: &Key,
    homes: usize,
    routing: Routing,
) -> Result<Directory> {
    let mut servers = Vec::new();
    for (place, dlock) in clients.iter().enumerate() {
        let site = site(dlock, InventoryId { key: key.clone(), birth: 0 })?;
        let fresh = format!("{:016x}", rand::random::<u64>());
        let given = site.call(|store, _| async move { store.identity(Some(&fresh)).await });
        let server = given.await?;
        let server = server.unwrap_or_else(|| "-".to_owned());
        if clients.len() > 1 && (server == "-" || servers.contains(&server)) {
            return Err(Error::Invalid(format!(
                "server {place} of the list is in it twice, or is not a single server; name each server once, and a cluster alone"
            )));
        }
        servers.push(server);
    }
    let keys = names::of_homes(&clients[0], key, homes).await?;
    let servers = servers.iter().cycle().cloned();
    let creation = format!("{:016x}", rand::random::<u64>());
    Ok(Directory { routing, creation, homes: keys.into_iter().zip(servers).collect() })
}

/// The key of a home, with the label of the sale: logs show no values.
fn labelled(sale: &Key, home: &Key) -> Key {
    let name = home.as_str().strip_prefix(sale.as_str());
    let part = match name.map(|rest| rest.strip_prefix(':').unwrap_or(rest)) {
        Some("") => Some(sale.clone()),
        Some(name) => sale.part(name).ok(),
        None => None,
    };
    part.filter(|part| part.as_str() == home.as_str()).unwrap_or_else(|| home.clone())
}

fn other_servers(place: usize) -> Error {
    Error::Conflict(format!(
        "server {place} of the list is not the one that the inventory was created with: the list is in another order, or has other servers; give all servers in the order of the creation"
    ))
}

fn empty_server(place: usize) -> Error {
    Error::Lost(format!(
        "server {place} of the list has none of the data that it had when the inventory was created: it lost them, or is another server; if it lost them, stop selling and make its homes again with `dlock inventory NAME repair` or Inventory::repair()"
    ))
}
