//! `dlock show`: who holds a key and who waits for it.

use anyhow::Result;
use clap::Args;
use dlock::Key;

use crate::Common;
use crate::key_view::{HolderView, InStore, KeyView, WaiterView};
use crate::output::{self, BOLD, GOOD, styled};

/// Show who holds a key and who waits for it
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  dlock show order:7")]
pub(crate) struct Show {
    /// The key to show
    key: String,
}

impl Show {
    pub(crate) async fn run(self, common: &Common) -> Result<()> {
        let key = Key::new(&self.key)?;
        let dlock = common.connect().await?;
        let view = KeyView::new(&key, dlock.inspect(&key).await?);
        if common.json {
            return output::print_json(&InStore { store: &dlock.store().into(), value: view });
        }
        output::print(format!("{} in {}", styled(BOLD, &view.key), dlock.store()));
        if view.holders.is_empty() {
            output::print("  free");
        }
        for HolderView { columns: [who, token, held_for, expires_in], is_over, .. } in &view.holders
        {
            let (held, until) = match is_over {
                true => ("kept", format!("the holder is done; {expires_in}")),
                false => ("held", format!("expires in {expires_in} unless renewed")),
            };
            output::print(format!("  {} by {who}", styled(GOOD, held)));
            output::print(format!("    token {token}, for {held_for}, {until}"));
        }
        for (index, WaiterView { columns: [who, waiting_for], .. }) in
            view.waiters.iter().enumerate()
        {
            output::print(format!("  waiting, {} in line: {who}, for {waiting_for}", index + 1));
        }
        if let Some(by) = &view.broken_by {
            output::print(format!("  last broken by {by}"));
        }
        Ok(())
    }
}
