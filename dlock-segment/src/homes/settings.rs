//! The settings of a sale: pause, opening times, limit, retention. The highest version wins,
//! and whoever sees a home with an older one brings it the newest.

use super::moves::reached;
use super::{Collected, Homes};
use crate::store::{Change, Settings};

/// The newest settings that any home has.
pub(crate) fn newest(collected: &Collected) -> Option<Settings> {
    let all = reached(collected).map(|(_, seen)| seen.view.settings());
    all.max_by_key(|settings| settings.version)
}

impl Homes {
    /// Brings the newest settings to the homes that have older ones. A home that does not
    /// take them gets them from whoever looks next.
    pub(super) async fn spread_settings(&self, collected: &Collected) {
        let Some(newest) = newest(collected) else { return };
        for (home, seen) in reached(collected) {
            if seen.view.version < newest.version {
                let _ = self.sites[home].change(Change::Settings(newest)).await;
            }
        }
    }
}
