/*
 * Prints the layout of the kernel's user-verbs interface as its headers give it:
 *
 *	gcc -o layout layout.c && ./layout > layout.txt
 *
 * One line per struct (name, size), per field (name, offset, size) and per constant
 * (name, value). layout_test.go holds the Go declarations to layout.txt, and layout.txt to
 * this program where gcc and the headers (Debian: linux-libc-dev) are at hand.
 */
#include <stddef.h>
#include <stdio.h>
#include <netinet/in.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/ib_user_ioctl_cmds.h>
#include <rdma/ib_user_ioctl_verbs.h>
#include <rdma/rdma_user_ioctl_cmds.h>
#include <rdma/rdma_user_rxe.h>
#include <rdma/mlx4-abi.h>
#include <rdma/mlx5-abi.h>
#include <rdma/mlx5_user_ioctl_cmds.h>
#include <rdma/mlx5_user_ioctl_verbs.h>

#define S(type) printf("struct %s %zu\n", #type, sizeof(struct type))
#define F(type, field) printf("field %s.%s %zu %zu\n", #type, #field, \
	offsetof(struct type, field), sizeof(((struct type *)0)->field))
/* M: a member that is an unnamed struct; MF: its fields, counted from its own start. */
#define M(type, member) printf("struct %s.%s %zu\n", #type, #member, sizeof(((struct type *)0)->member))
#define MF(type, member, field) printf("field %s.%s.%s %zu %zu\n", #type, #member, #field, \
	offsetof(struct type, member.field) - offsetof(struct type, member), sizeof(((struct type *)0)->member.field))
#define C(name) printf("const %s %llu\n", #name, (unsigned long long)(name))

int main(void)
{
	S(ib_uverbs_ioctl_hdr);
	F(ib_uverbs_ioctl_hdr, length);
	F(ib_uverbs_ioctl_hdr, object_id);
	F(ib_uverbs_ioctl_hdr, method_id);
	F(ib_uverbs_ioctl_hdr, num_attrs);
	F(ib_uverbs_ioctl_hdr, reserved1);
	F(ib_uverbs_ioctl_hdr, driver_id);
	F(ib_uverbs_ioctl_hdr, reserved2);

	S(ib_uverbs_attr);
	F(ib_uverbs_attr, attr_id);
	F(ib_uverbs_attr, len);
	F(ib_uverbs_attr, flags);
	F(ib_uverbs_attr, attr_data);
	F(ib_uverbs_attr, data);

	S(ib_uverbs_qp_cap);
	F(ib_uverbs_qp_cap, max_send_wr);
	F(ib_uverbs_qp_cap, max_recv_wr);
	F(ib_uverbs_qp_cap, max_send_sge);
	F(ib_uverbs_qp_cap, max_recv_sge);
	F(ib_uverbs_qp_cap, max_inline_data);

	S(ib_uverbs_query_port_resp_ex);
	F(ib_uverbs_query_port_resp_ex, legacy_resp);
	F(ib_uverbs_query_port_resp_ex, port_cap_flags2);
	F(ib_uverbs_query_port_resp_ex, reserved);

	S(ib_uverbs_cmd_hdr);
	F(ib_uverbs_cmd_hdr, command);
	F(ib_uverbs_cmd_hdr, in_words);
	F(ib_uverbs_cmd_hdr, out_words);

	S(ib_uverbs_ex_cmd_hdr);
	F(ib_uverbs_ex_cmd_hdr, response);
	F(ib_uverbs_ex_cmd_hdr, provider_in_words);
	F(ib_uverbs_ex_cmd_hdr, provider_out_words);
	F(ib_uverbs_ex_cmd_hdr, cmd_hdr_reserved);

	S(ib_uverbs_get_context);
	F(ib_uverbs_get_context, response);
	S(ib_uverbs_get_context_resp);
	F(ib_uverbs_get_context_resp, async_fd);
	F(ib_uverbs_get_context_resp, num_comp_vectors);

	S(ib_uverbs_query_device);
	F(ib_uverbs_query_device, response);
	S(ib_uverbs_query_device_resp);
	F(ib_uverbs_query_device_resp, fw_ver);
	F(ib_uverbs_query_device_resp, node_guid);
	F(ib_uverbs_query_device_resp, sys_image_guid);
	F(ib_uverbs_query_device_resp, max_mr_size);
	F(ib_uverbs_query_device_resp, page_size_cap);
	F(ib_uverbs_query_device_resp, vendor_id);
	F(ib_uverbs_query_device_resp, vendor_part_id);
	F(ib_uverbs_query_device_resp, hw_ver);
	F(ib_uverbs_query_device_resp, max_qp);
	F(ib_uverbs_query_device_resp, max_qp_wr);
	F(ib_uverbs_query_device_resp, device_cap_flags);
	F(ib_uverbs_query_device_resp, max_sge);
	F(ib_uverbs_query_device_resp, max_sge_rd);
	F(ib_uverbs_query_device_resp, max_cq);
	F(ib_uverbs_query_device_resp, max_cqe);
	F(ib_uverbs_query_device_resp, max_mr);
	F(ib_uverbs_query_device_resp, max_pd);
	F(ib_uverbs_query_device_resp, max_qp_rd_atom);
	F(ib_uverbs_query_device_resp, max_ee_rd_atom);
	F(ib_uverbs_query_device_resp, max_res_rd_atom);
	F(ib_uverbs_query_device_resp, max_qp_init_rd_atom);
	F(ib_uverbs_query_device_resp, max_ee_init_rd_atom);
	F(ib_uverbs_query_device_resp, atomic_cap);
	F(ib_uverbs_query_device_resp, max_ee);
	F(ib_uverbs_query_device_resp, max_rdd);
	F(ib_uverbs_query_device_resp, max_mw);
	F(ib_uverbs_query_device_resp, max_raw_ipv6_qp);
	F(ib_uverbs_query_device_resp, max_raw_ethy_qp);
	F(ib_uverbs_query_device_resp, max_mcast_grp);
	F(ib_uverbs_query_device_resp, max_mcast_qp_attach);
	F(ib_uverbs_query_device_resp, max_total_mcast_qp_attach);
	F(ib_uverbs_query_device_resp, max_ah);
	F(ib_uverbs_query_device_resp, max_fmr);
	F(ib_uverbs_query_device_resp, max_map_per_fmr);
	F(ib_uverbs_query_device_resp, max_srq);
	F(ib_uverbs_query_device_resp, max_srq_wr);
	F(ib_uverbs_query_device_resp, max_srq_sge);
	F(ib_uverbs_query_device_resp, max_pkeys);
	F(ib_uverbs_query_device_resp, local_ca_ack_delay);
	F(ib_uverbs_query_device_resp, phys_port_cnt);
	F(ib_uverbs_query_device_resp, reserved);

	S(ib_uverbs_query_port);
	F(ib_uverbs_query_port, response);
	F(ib_uverbs_query_port, port_num);
	F(ib_uverbs_query_port, reserved);
	S(ib_uverbs_query_port_resp);
	F(ib_uverbs_query_port_resp, port_cap_flags);
	F(ib_uverbs_query_port_resp, max_msg_sz);
	F(ib_uverbs_query_port_resp, bad_pkey_cntr);
	F(ib_uverbs_query_port_resp, qkey_viol_cntr);
	F(ib_uverbs_query_port_resp, gid_tbl_len);
	F(ib_uverbs_query_port_resp, pkey_tbl_len);
	F(ib_uverbs_query_port_resp, lid);
	F(ib_uverbs_query_port_resp, sm_lid);
	F(ib_uverbs_query_port_resp, state);
	F(ib_uverbs_query_port_resp, max_mtu);
	F(ib_uverbs_query_port_resp, active_mtu);
	F(ib_uverbs_query_port_resp, lmc);
	F(ib_uverbs_query_port_resp, max_vl_num);
	F(ib_uverbs_query_port_resp, sm_sl);
	F(ib_uverbs_query_port_resp, subnet_timeout);
	F(ib_uverbs_query_port_resp, init_type_reply);
	F(ib_uverbs_query_port_resp, active_width);
	F(ib_uverbs_query_port_resp, active_speed);
	F(ib_uverbs_query_port_resp, phys_state);
	F(ib_uverbs_query_port_resp, link_layer);
	F(ib_uverbs_query_port_resp, flags);
	F(ib_uverbs_query_port_resp, reserved);

	S(ib_uverbs_alloc_pd);
	F(ib_uverbs_alloc_pd, response);
	S(ib_uverbs_alloc_pd_resp);
	F(ib_uverbs_alloc_pd_resp, pd_handle);
	S(ib_uverbs_dealloc_pd);
	F(ib_uverbs_dealloc_pd, pd_handle);

	S(ib_uverbs_reg_mr);
	F(ib_uverbs_reg_mr, response);
	F(ib_uverbs_reg_mr, start);
	F(ib_uverbs_reg_mr, length);
	F(ib_uverbs_reg_mr, hca_va);
	F(ib_uverbs_reg_mr, pd_handle);
	F(ib_uverbs_reg_mr, access_flags);
	S(ib_uverbs_reg_mr_resp);
	F(ib_uverbs_reg_mr_resp, mr_handle);
	F(ib_uverbs_reg_mr_resp, lkey);
	F(ib_uverbs_reg_mr_resp, rkey);
	S(ib_uverbs_dereg_mr);
	F(ib_uverbs_dereg_mr, mr_handle);

	S(ib_uverbs_alloc_mw);
	F(ib_uverbs_alloc_mw, response);
	F(ib_uverbs_alloc_mw, pd_handle);
	F(ib_uverbs_alloc_mw, mw_type);
	F(ib_uverbs_alloc_mw, reserved);
	S(ib_uverbs_alloc_mw_resp);
	F(ib_uverbs_alloc_mw_resp, mw_handle);
	F(ib_uverbs_alloc_mw_resp, rkey);
	S(ib_uverbs_dealloc_mw);
	F(ib_uverbs_dealloc_mw, mw_handle);

	S(ib_uverbs_create_comp_channel);
	F(ib_uverbs_create_comp_channel, response);
	S(ib_uverbs_create_comp_channel_resp);
	F(ib_uverbs_create_comp_channel_resp, fd);

	S(ib_uverbs_create_cq);
	F(ib_uverbs_create_cq, response);
	F(ib_uverbs_create_cq, user_handle);
	F(ib_uverbs_create_cq, cqe);
	F(ib_uverbs_create_cq, comp_vector);
	F(ib_uverbs_create_cq, comp_channel);
	F(ib_uverbs_create_cq, reserved);
	S(ib_uverbs_create_cq_resp);
	F(ib_uverbs_create_cq_resp, cq_handle);
	F(ib_uverbs_create_cq_resp, cqe);

	S(ib_uverbs_req_notify_cq);
	F(ib_uverbs_req_notify_cq, cq_handle);
	F(ib_uverbs_req_notify_cq, solicited_only);

	S(ib_uverbs_destroy_cq);
	F(ib_uverbs_destroy_cq, response);
	F(ib_uverbs_destroy_cq, cq_handle);
	F(ib_uverbs_destroy_cq, reserved);
	S(ib_uverbs_destroy_cq_resp);
	F(ib_uverbs_destroy_cq_resp, comp_events_reported);
	F(ib_uverbs_destroy_cq_resp, async_events_reported);

	S(ib_uverbs_create_qp);
	F(ib_uverbs_create_qp, response);
	F(ib_uverbs_create_qp, user_handle);
	F(ib_uverbs_create_qp, pd_handle);
	F(ib_uverbs_create_qp, send_cq_handle);
	F(ib_uverbs_create_qp, recv_cq_handle);
	F(ib_uverbs_create_qp, srq_handle);
	F(ib_uverbs_create_qp, max_send_wr);
	F(ib_uverbs_create_qp, max_recv_wr);
	F(ib_uverbs_create_qp, max_send_sge);
	F(ib_uverbs_create_qp, max_recv_sge);
	F(ib_uverbs_create_qp, max_inline_data);
	F(ib_uverbs_create_qp, sq_sig_all);
	F(ib_uverbs_create_qp, qp_type);
	F(ib_uverbs_create_qp, is_srq);
	F(ib_uverbs_create_qp, reserved);
	S(ib_uverbs_create_qp_resp);
	F(ib_uverbs_create_qp_resp, qp_handle);
	F(ib_uverbs_create_qp_resp, qpn);
	F(ib_uverbs_create_qp_resp, max_send_wr);
	F(ib_uverbs_create_qp_resp, max_recv_wr);
	F(ib_uverbs_create_qp_resp, max_send_sge);
	F(ib_uverbs_create_qp_resp, max_recv_sge);
	F(ib_uverbs_create_qp_resp, max_inline_data);
	F(ib_uverbs_create_qp_resp, reserved);

	S(ib_uverbs_qp_dest);
	F(ib_uverbs_qp_dest, dgid);
	F(ib_uverbs_qp_dest, flow_label);
	F(ib_uverbs_qp_dest, dlid);
	F(ib_uverbs_qp_dest, reserved);
	F(ib_uverbs_qp_dest, sgid_index);
	F(ib_uverbs_qp_dest, hop_limit);
	F(ib_uverbs_qp_dest, traffic_class);
	F(ib_uverbs_qp_dest, sl);
	F(ib_uverbs_qp_dest, src_path_bits);
	F(ib_uverbs_qp_dest, static_rate);
	F(ib_uverbs_qp_dest, is_global);
	F(ib_uverbs_qp_dest, port_num);

	S(ib_uverbs_modify_qp);
	F(ib_uverbs_modify_qp, dest);
	F(ib_uverbs_modify_qp, alt_dest);
	F(ib_uverbs_modify_qp, qp_handle);
	F(ib_uverbs_modify_qp, attr_mask);
	F(ib_uverbs_modify_qp, qkey);
	F(ib_uverbs_modify_qp, rq_psn);
	F(ib_uverbs_modify_qp, sq_psn);
	F(ib_uverbs_modify_qp, dest_qp_num);
	F(ib_uverbs_modify_qp, qp_access_flags);
	F(ib_uverbs_modify_qp, pkey_index);
	F(ib_uverbs_modify_qp, alt_pkey_index);
	F(ib_uverbs_modify_qp, qp_state);
	F(ib_uverbs_modify_qp, cur_qp_state);
	F(ib_uverbs_modify_qp, path_mtu);
	F(ib_uverbs_modify_qp, path_mig_state);
	F(ib_uverbs_modify_qp, en_sqd_async_notify);
	F(ib_uverbs_modify_qp, max_rd_atomic);
	F(ib_uverbs_modify_qp, max_dest_rd_atomic);
	F(ib_uverbs_modify_qp, min_rnr_timer);
	F(ib_uverbs_modify_qp, port_num);
	F(ib_uverbs_modify_qp, timeout);
	F(ib_uverbs_modify_qp, retry_cnt);
	F(ib_uverbs_modify_qp, rnr_retry);
	F(ib_uverbs_modify_qp, alt_port_num);
	F(ib_uverbs_modify_qp, alt_timeout);
	F(ib_uverbs_modify_qp, reserved);

	S(ib_uverbs_destroy_qp);
	F(ib_uverbs_destroy_qp, response);
	F(ib_uverbs_destroy_qp, qp_handle);
	F(ib_uverbs_destroy_qp, reserved);
	S(ib_uverbs_destroy_qp_resp);
	F(ib_uverbs_destroy_qp_resp, events_reported);

	S(ib_uverbs_post_send);
	F(ib_uverbs_post_send, response);
	F(ib_uverbs_post_send, qp_handle);
	F(ib_uverbs_post_send, wr_count);
	F(ib_uverbs_post_send, sge_count);
	F(ib_uverbs_post_send, wqe_size);
	S(ib_uverbs_post_send_resp);
	F(ib_uverbs_post_send_resp, bad_wr);

	S(ib_uverbs_comp_event_desc);
	F(ib_uverbs_comp_event_desc, cq_handle);
	S(ib_uverbs_async_event_desc);
	F(ib_uverbs_async_event_desc, element);
	F(ib_uverbs_async_event_desc, event_type);
	F(ib_uverbs_async_event_desc, reserved);

	S(ib_uverbs_wc);
	F(ib_uverbs_wc, wr_id);
	F(ib_uverbs_wc, status);
	F(ib_uverbs_wc, opcode);
	F(ib_uverbs_wc, vendor_err);
	F(ib_uverbs_wc, byte_len);
	F(ib_uverbs_wc, ex);
	F(ib_uverbs_wc, qp_num);
	F(ib_uverbs_wc, src_qp);
	F(ib_uverbs_wc, wc_flags);
	F(ib_uverbs_wc, pkey_index);
	F(ib_uverbs_wc, slid);
	F(ib_uverbs_wc, sl);
	F(ib_uverbs_wc, dlid_path_bits);
	F(ib_uverbs_wc, port_num);
	F(ib_uverbs_wc, reserved);

	S(rxe_sge);
	F(rxe_sge, addr);
	F(rxe_sge, length);
	F(rxe_sge, lkey);
	S(mminfo);
	F(mminfo, offset);
	F(mminfo, size);
	F(mminfo, pad);
	S(rxe_dma_info);
	F(rxe_dma_info, length);
	F(rxe_dma_info, resid);
	F(rxe_dma_info, cur_sge);
	F(rxe_dma_info, num_sge);
	F(rxe_dma_info, sge_offset);
	F(rxe_dma_info, reserved);
	S(rxe_send_wr);
	F(rxe_send_wr, wr_id);
	F(rxe_send_wr, reserved);
	F(rxe_send_wr, opcode);
	F(rxe_send_wr, send_flags);
	F(rxe_send_wr, ex);
	F(rxe_send_wr, wr);
	M(rxe_send_wr, wr.rdma);
	MF(rxe_send_wr, wr.rdma, remote_addr);
	MF(rxe_send_wr, wr.rdma, rkey);
	MF(rxe_send_wr, wr.rdma, reserved);
	M(rxe_send_wr, wr.mw);
	MF(rxe_send_wr, wr.mw, addr);
	MF(rxe_send_wr, wr.mw, length);
	MF(rxe_send_wr, wr.mw, mr_lkey);
	MF(rxe_send_wr, wr.mw, mw_rkey);
	MF(rxe_send_wr, wr.mw, rkey);
	MF(rxe_send_wr, wr.mw, access);
	S(rxe_send_wqe);
	F(rxe_send_wqe, wr);
	F(rxe_send_wqe, status);
	F(rxe_send_wqe, state);
	F(rxe_send_wqe, iova);
	F(rxe_send_wqe, mask);
	F(rxe_send_wqe, first_psn);
	F(rxe_send_wqe, last_psn);
	F(rxe_send_wqe, ack_length);
	F(rxe_send_wqe, ssn);
	F(rxe_send_wqe, has_rd_atomic);
	F(rxe_send_wqe, dma);
	S(rxe_recv_wqe);
	F(rxe_recv_wqe, wr_id);
	F(rxe_recv_wqe, reserved);
	F(rxe_recv_wqe, padding);
	F(rxe_recv_wqe, dma);
	S(rxe_create_cq_resp);
	F(rxe_create_cq_resp, mi);
	S(rxe_create_qp_resp);
	F(rxe_create_qp_resp, rq_mi);
	F(rxe_create_qp_resp, sq_mi);
	S(rxe_queue_buf);
	F(rxe_queue_buf, log2_elem_size);
	F(rxe_queue_buf, index_mask);
	F(rxe_queue_buf, pad_1);
	F(rxe_queue_buf, producer_index);
	F(rxe_queue_buf, pad_2);
	F(rxe_queue_buf, consumer_index);
	F(rxe_queue_buf, pad_3);

	S(mlx5_ib_alloc_ucontext_req_v2);
	F(mlx5_ib_alloc_ucontext_req_v2, total_num_bfregs);
	F(mlx5_ib_alloc_ucontext_req_v2, num_low_latency_bfregs);
	F(mlx5_ib_alloc_ucontext_req_v2, flags);
	F(mlx5_ib_alloc_ucontext_req_v2, comp_mask);
	F(mlx5_ib_alloc_ucontext_req_v2, max_cqe_version);
	F(mlx5_ib_alloc_ucontext_req_v2, reserved0);
	F(mlx5_ib_alloc_ucontext_req_v2, reserved1);
	F(mlx5_ib_alloc_ucontext_req_v2, reserved2);
	F(mlx5_ib_alloc_ucontext_req_v2, lib_caps);

	S(mlx5_ib_alloc_ucontext_resp);
	F(mlx5_ib_alloc_ucontext_resp, qp_tab_size);
	F(mlx5_ib_alloc_ucontext_resp, bf_reg_size);
	F(mlx5_ib_alloc_ucontext_resp, tot_bfregs);
	F(mlx5_ib_alloc_ucontext_resp, cache_line_size);
	F(mlx5_ib_alloc_ucontext_resp, max_sq_desc_sz);
	F(mlx5_ib_alloc_ucontext_resp, max_rq_desc_sz);
	F(mlx5_ib_alloc_ucontext_resp, max_send_wqebb);
	F(mlx5_ib_alloc_ucontext_resp, max_recv_wr);
	F(mlx5_ib_alloc_ucontext_resp, max_srq_recv_wr);
	F(mlx5_ib_alloc_ucontext_resp, num_ports);
	F(mlx5_ib_alloc_ucontext_resp, flow_action_flags);
	F(mlx5_ib_alloc_ucontext_resp, comp_mask);
	F(mlx5_ib_alloc_ucontext_resp, response_length);
	F(mlx5_ib_alloc_ucontext_resp, cqe_version);
	F(mlx5_ib_alloc_ucontext_resp, cmds_supp_uhw);
	F(mlx5_ib_alloc_ucontext_resp, eth_min_inline);
	F(mlx5_ib_alloc_ucontext_resp, clock_info_versions);
	F(mlx5_ib_alloc_ucontext_resp, hca_core_clock_offset);
	F(mlx5_ib_alloc_ucontext_resp, log_uar_size);
	F(mlx5_ib_alloc_ucontext_resp, num_uars_per_page);
	F(mlx5_ib_alloc_ucontext_resp, num_dyn_bfregs);
	F(mlx5_ib_alloc_ucontext_resp, dump_fill_mkey);

	S(mlx5_ib_alloc_pd_resp);
	F(mlx5_ib_alloc_pd_resp, pdn);

	S(mlx5_ib_create_cq);
	F(mlx5_ib_create_cq, buf_addr);
	F(mlx5_ib_create_cq, db_addr);
	F(mlx5_ib_create_cq, cqe_size);
	F(mlx5_ib_create_cq, cqe_comp_en);
	F(mlx5_ib_create_cq, cqe_comp_res_format);
	F(mlx5_ib_create_cq, flags);
	F(mlx5_ib_create_cq, uar_page_index);
	F(mlx5_ib_create_cq, reserved0);
	F(mlx5_ib_create_cq, reserved1);

	S(mlx5_ib_create_cq_resp);
	F(mlx5_ib_create_cq_resp, cqn);
	F(mlx5_ib_create_cq_resp, reserved);

	S(mlx5_ib_create_qp);
	F(mlx5_ib_create_qp, buf_addr);
	F(mlx5_ib_create_qp, db_addr);
	F(mlx5_ib_create_qp, sq_wqe_count);
	F(mlx5_ib_create_qp, rq_wqe_count);
	F(mlx5_ib_create_qp, rq_wqe_shift);
	F(mlx5_ib_create_qp, flags);
	F(mlx5_ib_create_qp, uidx);
	F(mlx5_ib_create_qp, bfreg_index);
	F(mlx5_ib_create_qp, sq_buf_addr);
	F(mlx5_ib_create_qp, ece_options);
	F(mlx5_ib_create_qp, dci_streams);
	F(mlx5_ib_create_qp, reserved);

	S(mlx5_ib_create_qp_resp);
	F(mlx5_ib_create_qp_resp, bfreg_index);
	F(mlx5_ib_create_qp_resp, ece_options);
	F(mlx5_ib_create_qp_resp, comp_mask);
	F(mlx5_ib_create_qp_resp, tirn);
	F(mlx5_ib_create_qp_resp, tisn);
	F(mlx5_ib_create_qp_resp, rqn);
	F(mlx5_ib_create_qp_resp, sqn);
	F(mlx5_ib_create_qp_resp, reserved1);
	F(mlx5_ib_create_qp_resp, tir_icm_addr);

	S(mlx4_ib_alloc_ucontext_resp);
	F(mlx4_ib_alloc_ucontext_resp, dev_caps);
	F(mlx4_ib_alloc_ucontext_resp, qp_tab_size);
	F(mlx4_ib_alloc_ucontext_resp, bf_reg_size);
	F(mlx4_ib_alloc_ucontext_resp, bf_regs_per_page);
	F(mlx4_ib_alloc_ucontext_resp, cqe_size);

	S(mlx4_ib_alloc_ucontext_resp_v3);
	F(mlx4_ib_alloc_ucontext_resp_v3, qp_tab_size);
	F(mlx4_ib_alloc_ucontext_resp_v3, bf_reg_size);
	F(mlx4_ib_alloc_ucontext_resp_v3, bf_regs_per_page);

	S(mlx4_ib_alloc_pd_resp);
	F(mlx4_ib_alloc_pd_resp, pdn);
	F(mlx4_ib_alloc_pd_resp, reserved);

	S(mlx4_ib_create_cq);
	F(mlx4_ib_create_cq, buf_addr);
	F(mlx4_ib_create_cq, db_addr);

	S(mlx4_ib_create_cq_resp);
	F(mlx4_ib_create_cq_resp, cqn);
	F(mlx4_ib_create_cq_resp, reserved);

	S(mlx4_ib_create_qp);
	F(mlx4_ib_create_qp, buf_addr);
	F(mlx4_ib_create_qp, db_addr);
	F(mlx4_ib_create_qp, log_sq_bb_count);
	F(mlx4_ib_create_qp, log_sq_stride);
	F(mlx4_ib_create_qp, sq_no_prefetch);
	F(mlx4_ib_create_qp, reserved);
	F(mlx4_ib_create_qp, inl_recv_sz);

	C(RDMA_VERBS_IOCTL);
	C(IB_USER_VERBS_ABI_VERSION);
	C(RDMA_DRIVER_MLX5);
	C(RDMA_DRIVER_MLX4);
	C(RDMA_DRIVER_RXE);
	C(UVERBS_ATTR_F_MANDATORY);
	C(UVERBS_ATTR_F_VALID_OUTPUT);
	C(UVERBS_OBJECT_DEVICE);
	C(UVERBS_OBJECT_PD);
	C(UVERBS_OBJECT_CQ);
	C(UVERBS_OBJECT_QP);
	C(UVERBS_OBJECT_MR);
	C(UVERBS_OBJECT_MW);
	C(UVERBS_OBJECT_ASYNC_EVENT);
	C(UVERBS_ATTR_UHW_IN);
	C(UVERBS_ATTR_UHW_OUT);
	C(UVERBS_METHOD_INVOKE_WRITE);
	C(UVERBS_ATTR_CORE_IN);
	C(UVERBS_ATTR_CORE_OUT);
	C(UVERBS_ATTR_WRITE_CMD);
	C(UVERBS_METHOD_QUERY_PORT);
	C(UVERBS_ATTR_QUERY_PORT_PORT_NUM);
	C(UVERBS_ATTR_QUERY_PORT_RESP);
	C(UVERBS_METHOD_GET_CONTEXT);
	C(UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS);
	C(UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT);
	C(UVERBS_METHOD_CQ_CREATE);
	C(UVERBS_ATTR_CREATE_CQ_HANDLE);
	C(UVERBS_ATTR_CREATE_CQ_CQE);
	C(UVERBS_ATTR_CREATE_CQ_USER_HANDLE);
	C(UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL);
	C(UVERBS_ATTR_CREATE_CQ_COMP_VECTOR);
	C(UVERBS_ATTR_CREATE_CQ_FLAGS);
	C(UVERBS_ATTR_CREATE_CQ_RESP_CQE);
	C(UVERBS_ATTR_CREATE_CQ_EVENT_FD);
	C(UVERBS_METHOD_CQ_DESTROY);
	C(UVERBS_ATTR_DESTROY_CQ_HANDLE);
	C(UVERBS_ATTR_DESTROY_CQ_RESP);
	C(UVERBS_METHOD_QP_CREATE);
	C(UVERBS_ATTR_CREATE_QP_HANDLE);
	C(UVERBS_ATTR_CREATE_QP_PD_HANDLE);
	C(UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE);
	C(UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE);
	C(UVERBS_ATTR_CREATE_QP_USER_HANDLE);
	C(UVERBS_ATTR_CREATE_QP_CAP);
	C(UVERBS_ATTR_CREATE_QP_TYPE);
	C(UVERBS_ATTR_CREATE_QP_FLAGS);
	C(UVERBS_ATTR_CREATE_QP_EVENT_FD);
	C(UVERBS_ATTR_CREATE_QP_RESP_CAP);
	C(UVERBS_ATTR_CREATE_QP_RESP_QP_NUM);
	C(UVERBS_METHOD_QP_DESTROY);
	C(UVERBS_ATTR_DESTROY_QP_HANDLE);
	C(UVERBS_ATTR_DESTROY_QP_RESP);
	C(UVERBS_METHOD_PD_DESTROY);
	C(UVERBS_ATTR_DESTROY_PD_HANDLE);
	C(UVERBS_METHOD_MR_DESTROY);
	C(UVERBS_ATTR_DESTROY_MR_HANDLE);
	C(UVERBS_METHOD_MW_DESTROY);
	C(UVERBS_ATTR_DESTROY_MW_HANDLE);
	C(UVERBS_METHOD_ASYNC_EVENT_ALLOC);
	C(UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE);
	C(IB_USER_VERBS_CMD_GET_CONTEXT);
	C(IB_USER_VERBS_CMD_QUERY_DEVICE);
	C(IB_USER_VERBS_CMD_QUERY_PORT);
	C(IB_USER_VERBS_CMD_ALLOC_PD);
	C(IB_USER_VERBS_CMD_DEALLOC_PD);
	C(IB_USER_VERBS_CMD_REG_MR);
	C(IB_USER_VERBS_CMD_DEREG_MR);
	C(IB_USER_VERBS_CMD_ALLOC_MW);
	C(IB_USER_VERBS_CMD_DEALLOC_MW);
	C(IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL);
	C(IB_USER_VERBS_CMD_CREATE_CQ);
	C(IB_USER_VERBS_CMD_DESTROY_CQ);
	C(IB_USER_VERBS_CMD_REQ_NOTIFY_CQ);
	C(IB_USER_VERBS_CMD_CREATE_QP);
	C(IB_USER_VERBS_CMD_MODIFY_QP);
	C(IB_USER_VERBS_CMD_DESTROY_QP);
	C(IB_USER_VERBS_CMD_POST_SEND);
	C(IB_USER_VERBS_CMD_FLAG_EXTENDED);
	C(IB_UVERBS_QPT_RC);
	C(IB_UVERBS_QP_CREATE_SQ_SIG_ALL);
	C(IB_UVERBS_DEVICE_MEM_WINDOW);
	C(IB_UVERBS_DEVICE_MEM_MGT_EXTENSIONS);
	C(IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2A);
	C(IB_UVERBS_DEVICE_MEM_WINDOW_TYPE_2B);
	C(MLX5_IB_UVERBS_ABI_VERSION);
	C(MLX4_IB_UVERBS_ABI_VERSION);
	C(MLX4_IB_UVERBS_NO_DEV_CAPS_ABI_VERSION);
	C(MLX5_IB_ALLOC_UCTX_DEVX);
	C(MLX5_LIB_CAP_4K_UAR);
	C(MLX5_LIB_CAP_DYN_UAR);
	C(MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE);
	C(MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX);
	C(MLX5_QP_FLAG_SCATTER_CQE);
	C(MLX5_QP_FLAG_UAR_PAGE_INDEX);
	C(MLX4_USER_DEV_CAP_LARGE_CQE);
	C(MLX5_IB_OBJECT_UAR);
	C(MLX5_IB_METHOD_UAR_OBJ_ALLOC);
	C(MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE);
	C(MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE);
	C(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET);
	C(MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH);
	C(MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID);
	C(MLX5_IB_METHOD_UAR_OBJ_DESTROY);
	C(MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE);
	C(MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF);
	C(MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC);
	C(sizeof(struct ib_uverbs_send_wr));
	return 0;
}
