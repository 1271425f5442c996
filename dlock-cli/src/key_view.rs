//! How `ls`, `show` and `watch` print a key: its holders and waiters.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::Result;
use dlock::backend::{Cursor, KeyState};
use dlock::{Dlock, ErrorKind, Holder, Key, Mode, Store};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::output::{self, short};

/// How many keys are inspected at the same time.
const CONCURRENT_INSPECTS: usize = 32;

/// The store that the answer is about, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StoreView {
    store: String,
    namespace: String,
}

/// Something beside the store that it is in.
#[derive(Debug, Serialize)]
pub(crate) struct InStore<'a, T> {
    #[serde(flatten)]
    pub(crate) store: &'a StoreView,
    #[serde(flatten)]
    pub(crate) value: T,
}

impl From<Store> for StoreView {
    fn from(Store { address, namespace, .. }: Store) -> Self {
        StoreView { store: address, namespace }
    }
}

/// A key as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct KeyView {
    pub(crate) key: String,
    pub(crate) holders: Vec<HolderView>,
    pub(crate) waiters: Vec<WaiterView>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) broken_by: Option<String>,
    /// Why the key cannot be read; the other keys can.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HolderView {
    #[serde(flatten)]
    client: ClientView,
    token: Option<u64>,
    held_for_ms: u128,
    expires_in_ms: u128,
    pub(crate) is_over: bool,
    #[serde(skip)]
    pub(crate) columns: [String; 4],
}

#[derive(Debug, Serialize)]
pub(crate) struct WaiterView {
    #[serde(flatten)]
    client: ClientView,
    waiting_for_ms: u128,
    #[serde(skip)]
    pub(crate) columns: [String; 2],
}

#[derive(Debug, Serialize)]
struct ClientView {
    name: String,
    host: String,
    pid: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tags: Vec<(String, String)>,
    mode: String,
}

impl ClientView {
    fn new(holder: &Arc<Holder>, mode: Mode) -> Self {
        let Holder { name, host, pid, tags, .. } = &**holder;
        let (name, host) = (name.clone(), host.clone());
        ClientView { name, host, pid: *pid, tags: tags.clone(), mode: mode_name(mode) }
    }
}

fn mode_name(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permits { count, of } => format!("{count} of {of}"),
        other => format!("{other:?}"),
    }
}

impl KeyView {
    pub(crate) fn new(key: &Key, state: KeyState) -> Self {
        let holder = |it: dlock::backend::HolderState| HolderView {
            columns: [
                format!("{} {}", mode_name(it.mode), it.holder),
                it.token.map_or("-".into(), |token| token.to_string()),
                short(it.held_for),
                format!("{}{}", if it.is_over { "kept, " } else { "" }, short(it.expires_in)),
            ],
            client: ClientView::new(&it.holder, it.mode),
            token: it.token,
            held_for_ms: it.held_for.as_millis(),
            expires_in_ms: it.expires_in.as_millis(),
            is_over: it.is_over,
        };
        let waiter = |it: dlock::backend::WaiterState| WaiterView {
            columns: [format!("{} {}", mode_name(it.mode), it.holder), short(it.waiting_for)],
            client: ClientView::new(&it.holder, it.mode),
            waiting_for_ms: it.waiting_for.as_millis(),
        };
        KeyView {
            key: key.as_str().to_owned(),
            holders: state.holders.into_iter().map(holder).collect(),
            waiters: state.waiters.into_iter().map(waiter).collect(),
            broken_by: state.broken_by,
            problem: None,
        }
    }

    fn unreadable(key: &Key, error: &dlock::Error) -> Self {
        KeyView {
            key: key.as_str().to_owned(),
            holders: Vec::new(),
            waiters: Vec::new(),
            broken_by: None,
            problem: Some(error.to_string()),
        }
    }

    fn is_worth_showing(&self) -> bool {
        !self.holders.is_empty() || !self.waiters.is_empty() || self.problem.is_some()
    }
}

/// The keys with this prefix that are held or waited for, sorted.
pub(crate) async fn keys_in_use(dlock: &Dlock, prefix: &str) -> Result<Vec<KeyView>> {
    let mut keys = BTreeSet::new();
    let mut cursor = Some(Cursor::default());
    while let Some(position) = cursor {
        let page = dlock.list(prefix, position).await?;
        keys.extend(page.keys);
        cursor = page.next;
    }
    let mut left = keys.into_iter();
    let (mut inspecting, mut views) = (JoinSet::new(), Vec::new());
    loop {
        for key in left.by_ref().take(CONCURRENT_INSPECTS - inspecting.len()) {
            let dlock = dlock.clone();
            inspecting.spawn(async move {
                match dlock.inspect(&key).await {
                    Ok(state) => Ok(KeyView::new(&key, state)),
                    Err(error) if is_of_the_store(&error) => Err(error),
                    Err(error) => Ok(KeyView::unreadable(&key, &error)),
                }
            });
        }
        let Some(inspected) = inspecting.join_next().await else { break };
        views.push(inspected??);
    }
    views.retain(KeyView::is_worth_showing);
    views.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    Ok(views)
}

/// Whether the next key would fail in the same way.
fn is_of_the_store(error: &dlock::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Denied | ErrorKind::Unsupported
    )
}

/// A table of the keys.
pub(crate) fn table(keys: &[KeyView]) -> String {
    let numbers = ["TOKEN", "HELD FOR", "EXPIRES IN", "WAITING"];
    let headers = ["KEY", "HOLDER", "TOKEN", "HELD FOR", "EXPIRES IN", "WAITING"];
    let mut table = output::table(&headers, &numbers);
    for key in keys {
        let waiting = key.waiters.len().to_string();
        let unheld = [key.problem.clone().unwrap_or_default(), "".into(), "".into(), "".into()];
        let first = key.holders.first().map_or(&unheld, |holder| &holder.columns);
        let [who, token, held_for, expires_in] = first;
        table.add_row([&key.key, who, token, held_for, expires_in, &waiting]);
        for holder in key.holders.iter().skip(1) {
            let [who, token, held_for, expires_in] = &holder.columns;
            table.add_row(["", who, token, held_for, expires_in, ""]);
        }
    }
    table.to_string()
}
