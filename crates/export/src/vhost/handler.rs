//! Requests of a front end to the device.

use super::config::VhostConfig;
use super::device::{self, Geometry, MAX_QUEUE};
use super::inflight::InflightLog;
use super::memory::{GuestMap, MAX_REGIONS, SharedMap};
use super::own_memory::LARGEST;
use super::ring::{Ring, RingSetup};
use super::ring_control::{RingControl, RunningRings};
use crate::export::Export;
use crate::log::{Level, Log};
use crate::memory_budget::{Due, MemoryBudget};
use crate::pool::PoolHandle;
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_queue::{Queue, QueueT};
use zebu_storage::{ForeignEvent, Socket, is_eventfd};

/// Memory that a ring takes by being there.
const RING: u64 = 16 << 10;
/// Bytes of configuration space that may be asked for.
const MAX_CONFIG: usize = 256;

/// A ring, as far as the front end has set it up.
#[derive(Default)]
struct Vring {
    size: u16,
    /// Addresses of the front end: descriptors, used, available.
    addresses: Option<(u64, u64, u64)>,
    next_avail: u16,
    kick: Option<Socket>,
    call: Option<Arc<ForeignEvent>>,
    error: Option<Arc<ForeignEvent>>,
    is_enabled: bool,
    running: Option<Arc<RingControl>>,
}

/// The device of one front end.
pub(crate) struct Handler {
    export: Arc<Export>,
    connection: Arc<UnixStream>,
    pool: PoolHandle,
    messages: Log,
    /// Of all clients of the process.
    budget: MemoryBudget,
    features: u64,
    memory: SharedMap,
    inflight: Option<InflightLog>,
    vrings: Vec<Vring>,
    /// The rings of `vrings` that run, for who ends the device.
    running: Arc<RunningRings>,
}

/// A descriptor to be signalled.
fn event(fd: Option<File>, what: &str) -> Result<Option<Arc<ForeignEvent>>> {
    let event = fd.map(ForeignEvent::new).transpose();
    Ok(event.map_err(|error| failed(format!("the {what} descriptor: {error}")))?.map(Arc::new))
}

/// The protocol features of a device.
fn offered() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::RESET_DEVICE
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(io::Error::other(error))
}

impl Handler {
    pub(crate) fn new(
        export: &Arc<Export>,
        connection: UnixStream,
        pool: &PoolHandle,
        config: &VhostConfig,
        running: &Arc<RunningRings>,
    ) -> Self {
        Self {
            export: Arc::clone(export),
            connection: Arc::new(connection),
            pool: pool.clone(),
            messages: config.log.clone(),
            budget: config.memory.clone(),
            features: 0,
            memory: SharedMap::default(),
            inflight: None,
            vrings: (0..config.queues.max(1)).map(|_| Vring::default()).collect(),
            running: Arc::clone(running),
        }
    }

    /// Stops all rings; nothing is in flight then.
    pub(crate) fn stop_rings(&mut self) {
        // All at once, then one after the other.
        for vring in &self.vrings {
            if let Some(running) = &vring.running {
                running.stop.throw();
            }
        }
        for vring in &mut self.vrings {
            vring.stop();
        }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Starts a ring if everything is there that it needs.
    fn start_ring(&mut self, index: usize) -> Result<()> {
        let vring = &mut self.vrings[index];
        let (Some(addresses), Some(kick), true, None) =
            (vring.addresses, &vring.kick, vring.is_enabled, &vring.running)
        else {
            return Ok(());
        };
        let account = self.budget.admit(Due { fixed: RING, reserve: LARGEST }, Arc::default());
        let account = account.ok_or_else(|| failed("clients have half of the memory by being there"))?;
        let map = self.memory.get();
        let (descriptors, used, available) = addresses;
        let mut queue = Queue::new(MAX_QUEUE).map_err(failed)?;
        queue.try_set_size(vring.size).map_err(failed)?;
        queue.try_set_desc_table_address(map.guest_address(descriptors)?).map_err(failed)?;
        queue.try_set_used_ring_address(map.guest_address(used)?).map_err(failed)?;
        queue.try_set_avail_ring_address(map.guest_address(available)?).map_err(failed)?;
        queue.set_event_idx(self.features & device::feature::RING_EVENT_IDX != 0);
        queue.set_next_avail(vring.next_avail);
        queue.set_ready(true);
        if !queue.is_valid(map.memory()) {
            return Err(Error::InvalidParam);
        }
        let used = queue.used_idx(map.memory(), Ordering::Acquire).map_err(failed)?.0;
        queue.set_next_used(used);
        let mut log = self.inflight.as_ref().and_then(|log| log.ring(index as u16, vring.size));
        let again = log.as_mut().and_then(|log| log.begin(used));
        if let Some(again) = &again {
            // The log knows better than a front end whose device went away: what was taken is used or in flight.
            queue.set_next_avail(used.wrapping_add(again.len() as u16));
        }
        let control = Arc::new(RingControl::new(&self.connection, vring.call.clone(), vring.error.clone()));
        // What a killed process has used it may not have told of; a call for nothing does no harm.
        control.call().map_err(failed)?;
        if !self.running.add(&control) {
            return Err(failed("the device is at its end"));
        }
        vring.running = Some(Arc::clone(&control));
        let setup = RingSetup {
            export: Arc::clone(&self.export),
            memory: self.memory.clone(),
            queue,
            kick: kick.clone(),
            features: self.features,
            log,
            again: again.unwrap_or_default(),
            control,
            messages: self.messages.clone(),
            account,
        };
        self.pool.spawn_on(index, move |seat| Ring::run(seat, setup));
        Ok(())
    }

    fn set_memory(&mut self, map: GuestMap) {
        self.memory.set(map);
    }
}

impl Vring {
    /// Stops the ring, if it runs.
    fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            self.next_avail = running.end();
        }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.stop_rings();
    }
}

impl VhostUserBackendReqHandlerMut for Handler {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_rings();
        for vring in &mut self.vrings {
            *vring = Vring::default();
        }
        self.features = 0;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(device::features(&self.export))
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !device::features(&self.export) != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        if features & device::feature::VHOST_PROTOCOL == 0 {
            // Rings of such a front end need not be enabled.
            for index in 0..self.vrings.len() {
                self.vrings[index].is_enabled = true;
                self.start_ring(index)?;
            }
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<vhost::VhostUserMemoryRegionBase>>> {
        self.set_memory(GuestMap::of_table(table, files)?);
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        if size == 0 || size > MAX_QUEUE || !size.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        self.vring(index)?.size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        if flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG) {
            return Err(Error::InvalidParam);
        }
        let map = self.memory.get();
        for address in [descriptor, used, available] {
            map.guest_address(address)?;
        }
        self.vring(index)?.addresses = Some((descriptor, used, available));
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.vring(index)?.next_avail = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index)?;
        vring.stop();
        vring.kick = None;
        Ok(VhostUserVringState::new(index, vring.next_avail.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let Some(file) = fd else {
            // Without it, rings would have to be looked at all the time.
            return Err(failed("a ring needs a kick descriptor"));
        };
        // What is no eventfd may be readable for ever.
        if !is_eventfd(&file) {
            return Err(failed("the kick descriptor is no eventfd"));
        }
        let kick = Socket::shared_with_others(file).map_err(failed)?;
        let vring = self.vring(index.into())?;
        vring.stop();
        vring.kick = Some(kick);
        self.start_ring(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let call = event(fd, "call")?;
        let vring = self.vring(index.into())?;
        if let Some(running) = &vring.running {
            running.set_call(call.clone());
            // What was used in between was told to nobody.
            running.call().map_err(failed)?;
        }
        vring.call = call;
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let error = event(fd, "error")?;
        let vring = self.vring(index.into())?;
        if let Some(running) = &vring.running {
            running.set_error(error.clone());
        }
        vring.error = error;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(offered())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        // The crate that speaks the protocol keeps them.
        if features & !offered().bits() != 0 {
            return Err(failed(format!("protocol features that were not offered: {features:#x}")));
        }
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.vrings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let vring = self.vring(index)?;
        vring.is_enabled = enable;
        if enable {
            return self.start_ring(index as usize);
        }
        vring.stop();
        Ok(())
    }

    fn get_config(&mut self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let (offset, size) = (offset as usize, size as usize);
        if offset.checked_add(size).is_none_or(|end| end > MAX_CONFIG) {
            return Err(Error::InvalidParam);
        }
        let image = self.export.image();
        let disk = Geometry {
            size: image.virtual_size(),
            cluster: image.cluster_size(),
            logical_block: image.logical_block_size(),
        };
        let known = device::config_space(disk, self.vrings.len() as u16);
        let mut config = [0; MAX_CONFIG];
        config[..known.len()].copy_from_slice(&known);
        Ok(config[offset..offset + size].to_vec())
    }

    fn set_config(&mut self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        // Nothing in it can be written: the cache mode can't be changed. Writes of a guest have no effect.
        Ok(())
    }

    fn get_inflight_fd(&mut self, wish: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        if wish.num_queues as usize > self.vrings.len() || wish.num_queues == 0 || wish.queue_size > MAX_QUEUE
        {
            return Err(Error::InvalidParam);
        }
        let len = InflightLog::len_for(wish.num_queues, wish.queue_size);
        let memory = rustix::fs::memfd_create("zebu-inflight", MemfdFlags::CLOEXEC).map_err(failed)?;
        rustix::fs::ftruncate(&memory, len).map_err(failed)?;
        let file = File::from(memory);
        let answer = VhostUserInflight::new(len, 0, wish.num_queues, wish.queue_size);
        self.set_inflight_fd(&answer, file.try_clone().map_err(failed)?)?;
        Ok((answer, file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let (offset, len) = (inflight.mmap_offset, inflight.mmap_size);
        let log =
            InflightLog::map(file, offset, len, inflight.num_queues, inflight.queue_size).map_err(failed)?;
        self.inflight = Some(log);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<vhost::VhostUserMemoryRegionBase>> {
        let map = self.memory.get().with(region, fd)?;
        self.set_memory(map);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let map = self.memory.get().without(region)?;
        self.set_memory(map);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("this is a block device"))
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("objects are not shared"))
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("the device has no state to move"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("the device has no state to move"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("memory is not shared"))
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        self.messages
            .write(Level::Warning, format_args!("a front end wants a dirty log, which is not offered"));
        Err(Error::InvalidOperation("dirty memory is not logged"))
    }
}
