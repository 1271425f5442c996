//! axum handlers that run while they hold a lock, with one line of code each.
//!
//! Start it with `cargo run -p examples --bin annotated_handlers`. Then send requests
//! from several terminals:
//!
//! ```text
//! curl -X POST localhost:3000/orders/7/pay
//! curl -X POST localhost:3000/stock/phone/buy
//! ```
//!
//! With `DLOCK_URL=redis://localhost` several processes (each with its own `PORT`)
//! exclude each other.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use dlock::distributed_lock;
use tokio::sync::Mutex;

/// Stands in for a database: it reads and writes, but it has no transactions.
#[derive(Clone, Default)]
struct Database(Arc<Mutex<HashMap<String, u64>>>);

impl Database {
    async fn read(&self, name: &str) -> Option<u64> {
        tokio::time::sleep(Duration::from_millis(2)).await;
        self.0.lock().await.get(name).copied()
    }

    async fn write(&self, name: String, value: u64) {
        tokio::time::sleep(Duration::from_millis(2)).await;
        self.0.lock().await.insert(name, value);
    }
}

/// Pays an order once, even if many requests come at the same time.
#[distributed_lock(key = "order:{order}", ttl = "10s", wait = "30s")]
async fn pay(
    State(database): State<Database>,
    Path(order): Path<u64>,
) -> Result<&'static str, dlock::Error> {
    if database.read(&format!("order:{order}")).await.is_some() {
        return Ok("was already paid\n");
    }
    database.write(format!("order:{order}"), 1).await;
    Ok("paid now\n")
}

/// Sells one unit and never more than there are. Send the token with your writes, so that
/// the database can reject a write of an old holder.
#[distributed_lock(key = "stock:{sku}", wait = "30s", guard = lock)]
async fn buy(
    State(database): State<Database>,
    Path(sku): Path<String>,
) -> Result<Response, dlock::Error> {
    let left = database.read(&format!("stock:{sku}")).await.unwrap_or(10);
    if left == 0 {
        return Ok((StatusCode::CONFLICT, "sold out\n").into_response());
    }
    database.write(format!("stock:{sku}"), left - 1).await;
    Ok(format!("bought with token {}, {} left\n", lock.token(), left - 1).into_response())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    dlock::init(examples::connect().await?)?;
    let shop = Router::new()
        .route("/orders/{order}/pay", post(pay))
        .route("/stock/{sku}/buy", post(buy))
        .with_state(Database::default());
    let port = std::env::var("PORT").ok().and_then(|port| port.parse().ok()).unwrap_or(3_000);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, shop).await?;
    Ok(())
}
