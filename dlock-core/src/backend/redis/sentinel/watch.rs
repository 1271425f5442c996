//! Hearing of a switch of the primary.
//!
//! Each Sentinel is subscribed to by itself: the first that tells is enough. After each
//! subscription it is asked once, since the switch may have been told before.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use futures_core::Stream as _;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::answers::{Answer, switched_to};
use super::{Endpoint, Sentinels, ask};

const CHANNEL: &str = "+switch-master";
/// How often a Sentinel is asked whether it is still there.
const PROBE: Duration = Duration::from_secs(5);
/// The pause before a Sentinel that was lost is subscribed to again.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a subscription or the answer to a probe may take.
const PATIENCE: Duration = Duration::from_millis(1_500);

/// Calls `switched` when a Sentinel names another primary than the one that was believed
/// last, for as long as the future is polled. The same switch is told by each of them.
pub(in crate::backend::redis) async fn watch(
    sentinels: Arc<Sentinels>,
    mut switched: impl FnMut(),
) {
    let (sender, mut switches) = unbounded_channel();
    let mut tasks = tokio::task::JoinSet::new(); // aborted when this future is dropped
    for place in 0..sentinels.sentinels.len() {
        let (sentinels, sender) = (sentinels.clone(), sender.clone());
        tasks.spawn(async move {
            let endpoint = &sentinels.sentinels[place];
            loop {
                let _ = listen(endpoint, &sentinels, &sender).await;
                tokio::time::sleep(PAUSE).await;
            }
        });
    }
    while let Some((host, port)) = switches.recv().await {
        if sentinels.is_elsewhere(&host, port) {
            tracing::info!(target: "dlock::redis", host, port, "another server is the primary");
            switched();
        }
    }
}

/// Listens to one Sentinel until it is lost.
async fn listen(
    endpoint: &Endpoint,
    sentinels: &Sentinels,
    sender: &UnboundedSender<(String, u16)>,
) -> Option<()> {
    let client = endpoint.client().await.ok()?;
    let subscribing = async {
        let (mut sink, stream) = client.get_async_pubsub().await.ok()?.split();
        sink.subscribe(CHANNEL).await.ok()?;
        Some((sink, stream))
    };
    let (mut sink, mut stream) = tokio::time::timeout(PATIENCE, subscribing).await.ok()??;
    let asked = tokio::time::timeout(PATIENCE, ask(&client, &sentinels.name, endpoint.shown()))
        .await
        .ok()?;
    if let Answer::Primary(named) = asked {
        if sentinels.is_foreign(&named) {
            tokio::time::sleep(PROBE).await; // what it tells is about other servers
            return None;
        }
        if sentinels.is_newer(&named.primary) {
            sender.send((named.primary.host, named.primary.port)).ok()?;
        }
    }
    let mut probe = tokio::time::interval(PROBE);
    probe.reset();
    loop {
        tokio::select! {
            message = poll_fn(|cx| Pin::new(&mut stream).poll_next(cx)) => {
                let message = message?;
                let text = std::str::from_utf8(message.get_payload_bytes()).unwrap_or("");
                if let Some(primary) = switched_to(text, &sentinels.name) {
                    sender.send(primary).ok()?;
                }
            }
            _ = probe.tick() => {
                let asked = tokio::time::timeout(PATIENCE, sink.ping::<redis::Value>()).await;
                asked.ok()?.ok()?;
            }
        }
    }
}
