//! A sale with several homes is opened.

use dlock::{Dlock, Key};
use futures_util::future::join_all;

use super::create::complete;
use super::{ShardedInventory, names, site};
use crate::error::{Error, Result};
use crate::homes::{Directory, Site};
use crate::store::{InventoryId, View};

/// How many homes are looked for when the first one cannot be reached.
pub(super) const LOOKED_FOR: usize = 12;

/// What there is under a name.
pub(super) enum Found {
    None,
    /// An inventory with one home.
    One,
    Directory(Directory),
}

/// Which homes there are.
pub(super) struct Missing {
    pub(super) any_complete: bool,
    pub(super) missing: Vec<usize>,
    /// What each home answered.
    pub(super) views: Vec<Result<View>>,
}

impl Missing {
    /// The error if the sale was whole once, and homes are not there.
    pub(super) fn lost(&self, key: &Key) -> Error {
        let missing: Vec<String> = self.missing.iter().map(usize::to_string).collect();
        Error::Lost(format!(
            "home {} of the inventory `{}` is not in the store, and others are: the store lost it, or a removal was interrupted; make it again with `dlock inventory NAME repair` or Inventory::repair() and then reconcile it with your orders, or remove the rest with `dlock inventory NAME remove` or Inventory::remove_by_name()",
            missing.join(", "),
            key.label()
        ))
    }
}

impl Found {
    /// Looks for a directory in the first home, or in any other if that one is away or gone.
    pub(super) async fn by_name(
        clients: &[Dlock],
        key: &Key,
        homes: usize,
        birth: u64,
    ) -> Result<Self> {
        let first = site(&clients[0], InventoryId { key: key.clone(), birth })?;
        let first = directory_of(&first).await;
        match first {
            Ok(text) if text.is_empty() => return Ok(Found::One),
            Ok(text) => return Directory::parse(&text).map(Found::Directory),
            Err(Error::NotFound(_) | Error::Lost(_) | Error::Store(_)) => {}
            Err(error) => return Err(error),
        }
        let keys = match names::of_homes(&clients[0], key, homes).await {
            Ok(keys) => keys,
            // The first server is down; elsewhere the names do not depend on it.
            Err(_) => (0..homes)
                .map(
                    |home| {
                        if home == 0 { Ok(key.clone()) } else { key.part(&format!("home{home}")) }
                    },
                )
                .collect::<std::result::Result<_, _>>()?,
        };
        let mut sites = Vec::new();
        for (home, key) in keys.into_iter().enumerate().skip(1) {
            sites.push(site(&clients[home % clients.len()], InventoryId { key, birth: 0 })?);
        }
        let others = join_all(sites.iter().map(directory_of)).await;
        if let Some(text) = others.into_iter().flatten().find(|text| !text.is_empty()) {
            return Directory::parse(&text).map(Found::Directory);
        }
        match first {
            Err(Error::NotFound(_)) => Ok(Found::None),
            Err(error) => Err(error),
            Ok(_) => Ok(Found::None),
        }
    }
}

/// The directory of a home that is there; empty if it is the only one.
async fn directory_of(site: &Site) -> Result<String> {
    site.call(|store, id| async move {
        match store.open(&id).await? {
            view if view.is_one_of_several => store.directory(&id).await,
            _ => Ok(String::new()),
        }
    })
    .await
}

/// Looks which homes there are.
pub(super) async fn missing_homes(sites: &[Site]) -> Result<Missing> {
    let open = |site: Site| async move {
        let (view, directory) = site
            .call(|store, id| async move {
                let view = store.open(&id).await?;
                let directory = store.directory(&id).await?;
                Ok((view, directory))
            })
            .await?;
        Ok::<_, Error>((view, directory))
    };
    let opened = join_all(sites.iter().cloned().map(open)).await;
    let mut found = Missing { any_complete: false, missing: Vec::new(), views: Vec::new() };
    let mut directories = Vec::new();
    for (home, opened) in opened.into_iter().enumerate() {
        match opened {
            Ok((view, directory)) => {
                found.any_complete |= view.is_complete;
                directories.push((home, directory));
                found.views.push(Ok(view));
            }
            Err(error) => {
                if matches!(error, Error::NotFound(_) | Error::Lost(_)) {
                    found.missing.push(home);
                }
                found.views.push(Err(error));
            }
        }
    }
    if let Some((_, first)) = directories.first() {
        let other = directories.iter().find(|(_, directory)| directory != first);
        if let Some((home, _)) = other {
            return Err(Error::Conflict(format!(
                "home {home} belongs to another creation of the inventory; remove what is left of the older one"
            )));
        }
    }
    Ok(found)
}

impl ShardedInventory {
    /// Opens the sale of this name. `None` if it has one home; then that is opened as ever.
    pub(in super::super) async fn open(
        clients: &[Dlock],
        key: &Key,
        birth: u64,
    ) -> Result<Option<(Self, View)>> {
        let directory = match Found::by_name(clients, key, LOOKED_FOR, birth).await? {
            Found::Directory(directory) => directory,
            Found::One if clients.len() > 1 => {
                return Err(Error::Conflict(
                    "the inventory has one home, on the first server; open it with that one alone"
                        .into(),
                ));
            }
            Found::One | Found::None => return Ok(None),
        };
        let mut sites = Self::sites(clients, key, &directory).await?;
        sites[0].id.birth = birth;
        let found = missing_homes(&sites).await?;
        if !found.missing.is_empty() {
            return Err(match found.any_complete {
                true => found.lost(key),
                false => Error::NotFound(format!(
                    "the creation of `{}` was interrupted; create it again with the same terms",
                    key.label()
                )),
            });
        }
        for (site, view) in sites.iter_mut().zip(&found.views) {
            if let Ok(view) = view {
                site.id.birth = view.birth;
            }
        }
        let views: Vec<View> = found.views.iter().flatten().cloned().collect();
        if views.len() == sites.len() {
            complete(&sites, &views).await?;
        }
        let first = match (&found.views[0], birth) {
            (Ok(first), _) => first.clone(),
            (Err(error), 0) => return Err(error.clone()),
            // It is down, and the others go on selling what they have.
            (Err(_), birth) => View { birth, ..View::default() },
        };
        Ok(Some((ShardedInventory::new(directory, sites)?, first)))
    }
}
