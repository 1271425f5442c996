//! How a client hears of nodes: of the one in front of it, and of its own.

use std::sync::{Arc, Weak};
use std::time::Duration;

use zookeeper_client::{Error as ZkError, EventType, OneshotWatcher};

use super::claims::Watch;
use super::node_data;
use super::session::Session;
use crate::backend::Listener;
use crate::claim::{LossReason, Notice, Owner};
use crate::clock::Moment;
use crate::key::Key;

/// Who holds a key for longer than this watches its own node: short holds need not pay for
/// it, and long ones hear of a broken lock at once.
const UNWATCHED: Duration = Duration::from_millis(150);
/// The pause between two looks for such holders.
const LOOK: Duration = Duration::from_millis(100);

/// Lets the claim ask again when the watched node changes.
pub(super) fn ask_again(
    listener: Weak<dyn Listener>,
    key: Key,
    owner: Owner,
    path: String,
    watcher: OneshotWatcher,
) -> Watch {
    let task = tokio::spawn(async move {
        let event = watcher.changed().await;
        // The end of the session is told to everybody.
        if event.event_type != EventType::Session
            && let Some(listener) = listener.upgrade()
        {
            listener.on_notice(&key, owner, Notice::TryAgain);
        }
    });
    Watch::new(path, task.abort_handle())
}

/// Watches the nodes of long holders for as long as the session lives.
pub(super) async fn oversee(session: Weak<Session>, listener: Weak<dyn Listener>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(session) = session.upgrade().filter(|session| !session.is_over()) else { return };
        for (owner, key, path) in session.claims.unwatched(Moment::now() - UNWATCHED) {
            let watching =
                watch_own(Arc::downgrade(&session), listener.clone(), owner, key, path.clone());
            let task = tokio::spawn(watching).abort_handle();
            session.claims.watch_own(owner, Watch::new(path, task));
        }
    }
}

/// Waits until a node of ours is gone, or until an operator marks it.
async fn watch_own(
    session: Weak<Session>,
    listener: Weak<dyn Listener>,
    owner: Owner,
    key: Key,
    path: String,
) {
    let reason = loop {
        let client = session.upgrade().and_then(|session| session.client().ok());
        let Some(client) = client else { return };
        match client.get_and_watch_data(&path).await {
            Ok((data, _, watcher)) => {
                drop(client);
                if let Some(broken) = node_data::broken(&data) {
                    remove_later(session.clone(), path, broken.delay());
                    break LossReason::Broken { by: broken.by };
                }
                if watcher.changed().await.event_type == EventType::Session {
                    return;
                }
            }
            Err(ZkError::NoNode) => break LossReason::Forgotten,
            Err(_) => tokio::time::sleep(LOOK).await,
        }
    };
    if let (Some(session), Some(listener)) = (session.upgrade(), listener.upgrade()) {
        // Off this task, which the removal of the claim ends.
        tokio::spawn(async move {
            session.claims.remove(owner);
            listener.on_notice(&key, owner, Notice::Lost(reason));
        });
    }
}

/// Removes the node of a broken lock when its time is over. So does the operator, unless he
/// cannot any more.
fn remove_later(session: Weak<Session>, path: String, delay: Duration) {
    tokio::spawn(async move {
        tokio::time::sleep(delay).await;
        if let Some(session) = session.upgrade()
            && let Ok(client) = session.client()
        {
            let _ = session.write(|| client.delete(&path, None)).await;
        }
    });
}
