//! The handlers return `dlock::Error` as it is: feature `axum`.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::get;
use dlock::{Result, distributed_lock};

use crate::{App, Fixture};

#[distributed_lock(key = "order:{order}", client = app.dlock, guard = lock)]
async fn book(State(app): State<App>, Path(order): Path<usize>) -> Result<String> {
    Ok(app.book(order, lock).await)
}

#[distributed_lock(key = "order:{order}", wait = "0s", client = app.dlock)]
#[axum::debug_handler]
async fn busy(State(app): State<App>, Path(order): Path<usize>) -> Result<String> {
    Ok(order.to_string())
}

#[axum::debug_handler]
#[distributed_lock(key = "order:{id}", client = app.dlock)]
async fn long(State(app): State<App>, Path(id): Path<String>) -> Result<String> {
    Ok(id)
}

#[distributed_lock(key = "order:{order}", client = app.dlock)]
async fn stuck(State(app): State<App>, Path(order): Path<usize>) -> Result<String> {
    std::future::pending::<()>().await;
    Ok(order.to_string())
}

async fn serve(app: App) -> SocketAddr {
    let router = Router::new()
        .route("/orders/{order}", get(book))
        .route("/busy/{order}", get(busy))
        .route("/long/{id}", get(long))
        .route("/stuck/{order}", get(stuck))
        .with_state(app);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("its address");
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

async fn under_load(fixture: Fixture) {
    let [one, two] = fixture.apps.clone();
    let services = [serve(one).await, serve(two).await];
    fixture.storm(services).await;
    fixture.refusals(services[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory() {
    under_load(Fixture::memory()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis() {
    if let Some(fixture) = Fixture::redis() {
        under_load(fixture).await;
    }
}
